#include "rows-inl.h"

namespace laconic {

const RowsKernels kRowsAvx512 = kRowsKernels;

}  // namespace laconic
