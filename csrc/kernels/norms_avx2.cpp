#include "norms-inl.h"

namespace laconic {

const NormKernels kNormsAvx2 = {norms};

}  // namespace laconic
