// Columns of the dicts in a list.
#pragma once

#include <vector>

#include "store.h"

namespace memtrace {

// Writes the numbers of the dicts in a list or tuple; false if another value is in it.
bool read_dicts(const Store& store, Word sequence, uint32_t* dicts);

// Writes the values of a key; false if a dict does not have it, or has a value that is not an integer of 64 bits.
bool read_int64(const Store& store, const uint32_t* dicts, size_t count, uint32_t key, int64_t* values);

// Writes for each dict the number of its value in `distinct`, which is in the order of first appearance. A dict without
// the key has the value kMissing.
void read_codes(Store& store, const uint32_t* dicts, size_t count, uint32_t key, int32_t* codes,
                std::vector<Word>& distinct);

// Writes the value of a key of each dict, kMissing where a dict does not have it.
void read_words(const Store& store, const uint32_t* dicts, size_t count, uint32_t key, Word* words);

}  // namespace memtrace
