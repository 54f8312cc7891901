#include "blockwise-inl.h"

namespace laconic {

const BlockwiseKernels kBlockwisePortable = kBlockwiseKernels<Portable>;

}  // namespace laconic
