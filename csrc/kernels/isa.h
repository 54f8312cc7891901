// Instruction sets: which ones this build has and this CPU runs.
#pragma once

#include <string_view>
#include <vector>

#include "accumulate.h"
#include "adamw.h"
#include "bits.h"
#include "blockwise.h"
#include "entropy.h"
#include "gated.h"
#include "linear.h"
#include "lossless.h"
#include "norms.h"
#include "reduce.h"
#include "rows.h"

namespace laconic {

struct Isa {
  std::string_view name;  // "portable", "avx2", "avx512"
  const BlockwiseKernels* blockwise;
  const AccumulateKernels* accumulate;
  const ReduceKernels* reduce;
  const AdamWKernels* adamw;
  const LosslessKernels* lossless;
  const RowsKernels* rows;
  const GatedKernels* gated;
  const LinearKernels* linear;
  const BitsKernels* bits;
  const NormKernels* norms;
  const EntropyKernels* entropy;
};

// Those that this CPU runs, slowest first; "portable" always comes first.
const std::vector<Isa>& supported_isas();

}  // namespace laconic
