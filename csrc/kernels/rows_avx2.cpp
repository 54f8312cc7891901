#include "rows-inl.h"

namespace laconic {

const RowsKernels kRowsAvx2 = kRowsKernels;

}  // namespace laconic
