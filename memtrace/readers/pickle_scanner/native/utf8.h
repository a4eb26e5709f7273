// Which bytes Python decodes as UTF-8 with the error handler "surrogatepass", as its unpickler does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace memtrace {

inline bool is_utf8(const uint8_t* text, size_t count) {
  const uint8_t* end = text + count;
  while (text < end) {
    if (end - text >= 8) {  // ASCII
      uint64_t part;
      std::memcpy(&part, text, 8);
      if ((part & 0x8080808080808080u) == 0) {
        text += 8;
        continue;
      }
    }
    const uint8_t lead = *text;
    const size_t length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (length == 0 || static_cast<size_t>(end - text) < length) return false;
    for (size_t at = 1; at < length; ++at) {
      if ((text[at] & 0xC0) != 0x80) return false;
    }
    if ((lead == 0xE0 && text[1] < 0xA0) || (lead == 0xF0 && text[1] < 0x90) || (lead == 0xF4 && text[1] > 0x8F)) {
      return false;  // too long, or beyond U+10FFFF
    }
    text += length;
  }
  return true;
}

}  // namespace memtrace
