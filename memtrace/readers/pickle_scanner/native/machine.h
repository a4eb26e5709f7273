// The stack machine that runs a pickle of protocols 2 to 5, with the rules of CPython's Modules/_pickle.c.
#pragma once

#include "known_lists.h"
#include "store.h"

namespace memtrace {

class Machine {
 public:
  Machine(Store& store, uint64_t seed) : store_(store), known_lists_(seed) {}

  // Runs the next bytes of the pickle. What follows the end of the pickle is ignored.
  void feed(const uint8_t* data, size_t count);
  // Whether the pickle is whole, once all bytes were fed.
  bool is_complete() const { return is_done_ && num_bytes_ >= frames_end_; }
  Word result() const { return result_; }

 private:
  // Runs all opcodes that are whole; returns the first byte of the first one that is not.
  const uint8_t* run(const uint8_t* begin, const uint8_t* end);
  // Runs the opcodes of references and integers up to another one, or up to the last bytes, which are left to
  // `run_opcode`; returns the byte after them.
  const uint8_t* push_values(const uint8_t* at, const uint8_t* end);
  // Runs what follows the mark behind a list, up to its end if it has elements of these opcodes only.
  const uint8_t* run_list(const uint8_t* at, const uint8_t* end);
  void push_reference(size_t number);
  // Runs one opcode with a fixed number of bytes behind it; returns the byte after it, or nullptr if bytes are missing.
  const uint8_t* run_opcode(uint8_t opcode, const uint8_t* at, const uint8_t* end);
  const uint8_t* run_counted(uint8_t opcode, const uint8_t* at, const uint8_t* end);
  void push_text(Tag tag, const uint8_t* text, size_t count);
  void remember(size_t number);
  void make_tuple(size_t first);
  void set_items(size_t first);
  void append_items(size_t first);
  void begin_frame(const uint8_t* size, const uint8_t* after);
  void stop();
  size_t pop_mark();
  // The first value that the opcodes after the last mark may use.
  size_t fence() const { return marks_.empty() ? 0 : marks_[marks_.size() - 1]; }
  void need(size_t count) const;

  Store& store_;
  Buffer<Word> stack_;
  Buffer<size_t> marks_;
  Buffer<Word> memo_;
  KnownLists known_lists_;
  size_t num_memoized_ = 0;
  Buffer<uint8_t> pending_;  // the beginning of an opcode whose end was not fed yet
  const uint8_t* chunk_begin_ = nullptr;
  uint64_t num_bytes_ = 0;    // fed so far
  uint64_t chunk_start_ = 0;  // position of `chunk_begin_` in the pickle
  uint64_t frames_end_ = 0;   // where the last frame ends: CPython refuses a frame that is cut off
  Word result_ = 0;
  bool is_done_ = false;
};

}  // namespace memtrace
