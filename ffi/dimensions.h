// The extents of XLA's buffers, for the handlers' checks and messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_ggemm {

using Dimensions = xla::ffi::Span<const int64_t>;

inline std::string ToString(Dimensions dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? "," : "") + std::to_string(dims[i]);
  return text + "]";
}

}  // namespace jax_ggemm
