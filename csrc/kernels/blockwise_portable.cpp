#include "blockwise-inl.h"

namespace laconic {

const BlockwiseKernels kBlockwisePortable = {quantize<Portable>, dequantize<Portable>};

}  // namespace laconic
