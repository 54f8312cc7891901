#include "linear-inl.h"

namespace laconic {

const LinearKernels kLinearPortable = {linear<Portable>};

}  // namespace laconic
