#include "gated-inl.h"
#include "simd_avx2-inl.h"
#include "simd_avx512-inl.h"

namespace laconic {
namespace {

// Blocks of 16 are half a group of AVX-512, so they take the narrower vocabulary.
void gated_widest(const Gated& task, int64_t first, int64_t last) {
  task.block_size < Avx512::kGroup ? gated<Avx2>(task, first, last)
                                   : gated<Avx512>(task, first, last);
}

}  // namespace

const GatedKernels kGatedAvx512 = {gated_widest};

}  // namespace laconic
