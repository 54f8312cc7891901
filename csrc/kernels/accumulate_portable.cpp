#include "accumulate-inl.h"

namespace laconic {

const AccumulateKernels kAccumulatePortable = kAccumulateKernels<Portable>;

double tree_sum(const double* v, int64_t n) {
  if (n == 0) return 0.0;
  if (n == 1) return v[0];
  int64_t half = 1;
  while (2 * half < n) half *= 2;
  return tree_sum(v, half) + tree_sum(v + half, n - half);
}

}  // namespace laconic
