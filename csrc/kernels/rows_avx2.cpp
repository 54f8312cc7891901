#include "rows-inl.h"

namespace laconic {

const RowsKernels kRowsAvx2 = {sum_rows};

}  // namespace laconic
