// Writes values as a pickle, by which Python makes objects of the few values that no column holds.
#pragma once

#include <unordered_map>

#include "store.h"

namespace memtrace {

class PickleWriter {
 public:
  PickleWriter(const Store& store, Buffer<uint8_t>& out) : store_(store), out_(out) {}

  // Writes a list of the values. A value that appears twice becomes one object.
  void write_list(const Word* words, size_t count);

 private:
  void write(Word word, int depth);
  void write_text(Tag tag, uint32_t id);
  void write_integer(const void* bytes, size_t count);
  void write_container(Word word, int depth);
  bool write_reference(Word word);
  void remember(Word word);
  template <class T>
  void put(uint8_t opcode, T argument) {
    out_.push(opcode);
    out_.append(reinterpret_cast<const uint8_t*>(&argument), sizeof(T));
  }

  const Store& store_;
  Buffer<uint8_t>& out_;
  std::unordered_map<Word, uint32_t> memo_;
};

}  // namespace memtrace
