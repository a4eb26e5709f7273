// When operators ran on the device: the host runs ahead of it, so the host's clock does not tell.
#pragma once

#include <cstdint>

#include "tables.h"

namespace memtrace {

constexpr uint64_t kNotTimed = 0;

bool device_time_supported();
// Mark the start of a call on the current stream of a device; kNotTimed where it cannot be timed (a stream that is being
// captured into a graph).
uint64_t start_device_time(int8_t device);
// Mark the end of the call that `start_device_time` gave a ticket for.
void end_device_time(uint64_t ticket, int64_t op, int8_t device);
// The calls that are done on the device by now.
void take_device_times(DeviceTimeColumns& out);
// Wait for those that are not, so that the last `take_device_times` has them.
void finish_device_times();

}  // namespace memtrace
