// The C interface, which Python calls through ctypes. No exception crosses it.
#include <cstdint>
#include <cstdio>

#include "dump.h"
#include "machine.h"
#include "rows.h"

#define MEMTRACE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace memtrace;

enum Status : int { kOk = 0, kNo = 1, kUnsupported = 2, kOutOfMemory = 3 };

uint64_t random_seed() {
  uint64_t seed = reinterpret_cast<uintptr_t>(&seed);
  if (std::FILE* file = std::fopen("/dev/urandom", "rb")) {
    uint64_t random = 0;
    if (std::fread(&random, sizeof(random), 1, file) == 1) seed ^= random;
    std::fclose(file);
  }
  return seed;
}

struct Scan {
  const uint64_t seed = random_seed();
  Store store{seed};
  Machine machine{store, seed};
  Buffer<uint8_t> dumped;
  std::vector<Word> distinct;
  const char* reason = "";
};

template <class Function>
int guarded(Scan* scan, Function function) {
  try {
    return function() ? kOk : kNo;
  } catch (const Unsupported& error) {
    scan->reason = error.reason;
    return kUnsupported;
  } catch (const std::exception&) {  // bad_alloc, length_error
    return kOutOfMemory;
  }
}

}  // namespace

MEMTRACE_EXPORT void* scan_new() {
  try {
    return new Scan();
  } catch (const std::exception&) {
    return nullptr;
  }
}

MEMTRACE_EXPORT void scan_free(Scan* scan) { delete scan; }

MEMTRACE_EXPORT const char* scan_reason(const Scan* scan) { return scan->reason; }

MEMTRACE_EXPORT int scan_feed(Scan* scan, const uint8_t* data, size_t count) {
  return guarded(scan, [&] {
    scan->machine.feed(data, count);
    return true;
  });
}

// kNo if the pickle is truncated.
MEMTRACE_EXPORT int scan_finish(const Scan* scan, Word* root) {
  *root = scan->machine.result();
  return scan->machine.is_complete() ? kOk : kNo;
}

MEMTRACE_EXPORT size_t scan_length(const Scan* scan, Word word) {
  if (tag_of(word) == kDict) return scan->store.num_items(static_cast<uint32_t>(index_of(word)));
  size_t count;
  scan->store.items(word, count);
  return count;
}

MEMTRACE_EXPORT void scan_items(const Scan* scan, Word sequence, Word* items) {
  size_t count;
  const Word* words = scan->store.items(sequence, count);
  if (count != 0) std::memcpy(items, words, count * sizeof(Word));
}

// Keys and values of a dict in turn.
MEMTRACE_EXPORT void scan_members(const Scan* scan, Word dict, Word* words) {
  const uint32_t number = static_cast<uint32_t>(index_of(dict));
  for (size_t position = 0; position < scan->store.num_items(number); ++position) {
    uint32_t key;
    scan->store.item(number, position, key, words[2 * position + 1]);
    words[2 * position] = make_word(kStr, key);
  }
}

// The number of a key; UINT32_MAX if no string of the pickle equals it.
MEMTRACE_EXPORT uint32_t scan_key(const Scan* scan, const char* text, size_t count) {
  return scan->store.strings.find(text, count);
}

MEMTRACE_EXPORT int scan_dicts(const Scan* scan, Word sequence, uint32_t* dicts) {
  return read_dicts(scan->store, sequence, dicts) ? kOk : kNo;
}

MEMTRACE_EXPORT int scan_int64(const Scan* scan, const uint32_t* dicts, size_t count, uint32_t key, int64_t* values) {
  return read_int64(scan->store, dicts, count, key, values) ? kOk : kNo;
}

MEMTRACE_EXPORT void scan_words(const Scan* scan, const uint32_t* dicts, size_t count, uint32_t key, Word* words) {
  read_words(scan->store, dicts, count, key, words);
}

// The distinct values are in `scan_distinct` until the next call.
MEMTRACE_EXPORT int scan_codes(Scan* scan, const uint32_t* dicts, size_t count, uint32_t key, int32_t* codes,
                               size_t* num_distinct) {
  return guarded(scan, [&] {
    scan->distinct.clear();
    read_codes(scan->store, dicts, count, key, codes, scan->distinct);
    *num_distinct = scan->distinct.size();
    return true;
  });
}

MEMTRACE_EXPORT const Word* scan_distinct(const Scan* scan) { return scan->distinct.data(); }

// Writes a list of values as a pickle, which is valid until the next call.
MEMTRACE_EXPORT int scan_dump(Scan* scan, const Word* words, size_t count, const uint8_t** data, size_t* num_bytes) {
  return guarded(scan, [&] {
    PickleWriter(scan->store, scan->dumped).write_list(words, count);
    *data = scan->dumped.data();
    *num_bytes = scan->dumped.size();
    return true;
  });
}
