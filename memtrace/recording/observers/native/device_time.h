// Measures when operators ran on the GPU, which is later than when the host launched them.
#pragma once

#include <cstdint>

#include "tables.h"

namespace memtrace {

constexpr uint64_t kNotTimed = 0;

bool device_time_supported();
// Marks the start of a call on the current stream of a device. Returns a ticket for `end_device_time`; kNotTimed if the
// call cannot be timed, for example because the stream is being captured into a graph.
uint64_t start_device_time(int8_t device);
// Marks the end of the call that `start_device_time` returned the ticket for.
void end_device_time(uint64_t ticket, int64_t op, int8_t device);
// Adds the calls that have finished on the device.
void take_device_times(DeviceTimeColumns& out);
// Waits for all calls to finish, so that the last `take_device_times` adds them.
void finish_device_times();

}  // namespace memtrace
