#include "blockwise-inl.h"
#include "simd_avx2-inl.h"
#include "simd_avx512-inl.h"

namespace laconic {
namespace {

// Blocks of 16 are half a group of AVX-512, so they take the narrower vocabulary.
void quantize_widest(const Quantize& q, int64_t first, int64_t last) {
  q.block_size < Avx512::kGroup ? quantize<Avx2>(q, first, last) : quantize<Avx512>(q, first, last);
}

void dequantize_widest(const Dequantize& d, int64_t first, int64_t last) {
  d.block_size < Avx512::kGroup ? dequantize<Avx2>(d, first, last)
                                : dequantize<Avx512>(d, first, last);
}

}  // namespace

const BlockwiseKernels kBlockwiseAvx512 = {quantize_widest, dequantize_widest};

}  // namespace laconic
