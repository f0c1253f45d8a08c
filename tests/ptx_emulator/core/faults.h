// Faults, and how a run ends.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "program.h"

namespace ptx {

// Where something happens.
struct Site {
  uint32_t pc = 0;
  Dim3 cta;
  int warp = -1;
  uint32_t lanes = 0;
};

struct Fault {
  std::string kind;
  std::string message;
  Site site;
};

// Thrown where a launch cannot go on.
struct Stop {};

inline std::string Text(const char* format, ...) __attribute__((format(printf, 1, 2)));
inline std::string Text(const char* format, ...) {
  va_list arguments, again;
  va_start(arguments, format);
  va_copy(again, arguments);
  std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, format, arguments)), '\0');
  std::vsnprintf(text.data(), text.size() + 1, format, again);
  va_end(again);
  va_end(arguments);
  return text;
}

}  // namespace ptx
