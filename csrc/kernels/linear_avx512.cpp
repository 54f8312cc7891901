#include "linear-inl.h"
#include "simd_avx2-inl.h"
#include "simd_avx512-inl.h"

namespace laconic {
namespace {

// Blocks of 16 are half a group of AVX-512, so they take the narrower vocabulary.
void linear_widest(const Linear& task, int64_t first, int64_t last) {
  task.block_size < Avx512::kGroup ? linear<Avx2>(task, first, last)
                                   : linear<Avx512>(task, first, last);
}

}  // namespace

const LinearKernels kLinearAvx512 = {linear_widest};

}  // namespace laconic
