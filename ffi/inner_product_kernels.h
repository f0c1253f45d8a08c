// The inner products for each instruction set, to be called through InnerProduct.
#pragma once

#include <cstddef>

#include "inner_product.h"

namespace jax_ggemm {

// Returns scratch memory of this thread, aligned to 64 bytes and valid until the next call.
using Allocator = void* (*)(size_t bytes);

void InnerProductBase(const Block& block, bool wide, Allocator allocate);
void InnerProductAvx2(const Block& block, bool wide, Allocator allocate);
void InnerProductAvx512(const Block& block, bool wide, Allocator allocate);

}  // namespace jax_ggemm
