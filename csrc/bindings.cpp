// laconic._kernels: pointers in, nothing else. Sizes are checked by src/laconic/ops/declarations/
// before they come here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/isa.h"
#include "kernels/lossless_message.h"
#include "kernels/parallel.h"

namespace nb = nanobind;

namespace {

using laconic::FloatType;

// Waking a thread takes about as long as this many elements.
constexpr int64_t kElementsPerThread = 1 << 16;

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <class Work>
void run(int64_t rows, int64_t length, int64_t block_size, int64_t num_threads, const Work& work) {
  if (rows <= 0 || length <= 0) return;
  const int64_t useful = rows * length / kElementsPerThread;
  laconic::parallel_for(rows * ((length + block_size - 1) / block_size),
                        std::min(useful, num_threads), work);
}

void quantize_blockwise(size_t isa, int64_t num_threads, uintptr_t x, int x_type, int64_t rows,
                        int64_t row_stride, int64_t length, int64_t block_size, uintptr_t codes,
                        uintptr_t scales, int scale_type, int bits, float level_max,
                        uintptr_t codebook, bool stochastic, int64_t seed, int64_t first_index,
                        uintptr_t center, uintptr_t factor, uintptr_t product) {
  const laconic::BlockwiseKernels& kernels = *laconic::supported_isas().at(isa).blockwise;
  const laconic::Quantize task{pointer<const void>(x),
                               static_cast<FloatType>(x_type),
                               row_stride,
                               length,
                               block_size,
                               pointer<uint8_t>(codes),
                               pointer<void>(scales),
                               static_cast<FloatType>(scale_type),
                               bits,
                               level_max,
                               pointer<const laconic::Codebook>(codebook),
                               stochastic,
                               static_cast<uint64_t>(seed),
                               static_cast<uint64_t>(first_index),
                               pointer<const float>(center),
                               pointer<const void>(factor),
                               pointer<void>(product)};
  run(rows, length, block_size, num_threads,
      [&](int64_t first, int64_t last) { kernels.quantize(task, first, last); });
}

void dequantize_blockwise(size_t isa, int64_t num_threads, uintptr_t codes, uintptr_t scales,
                          int scale_type, int64_t rows, int64_t length, int64_t block_size,
                          uintptr_t values, int value_type, int bits, uintptr_t codebook,
                          uintptr_t center) {
  const laconic::BlockwiseKernels& kernels = *laconic::supported_isas().at(isa).blockwise;
  const laconic::Dequantize task{pointer<const uint8_t>(codes),
                                 pointer<const void>(scales),
                                 static_cast<FloatType>(scale_type),
                                 length,
                                 block_size,
                                 pointer<void>(values),
                                 static_cast<FloatType>(value_type),
                                 bits,
                                 pointer<const laconic::Codebook>(codebook),
                                 pointer<const float>(center)};
  run(rows, length, block_size, num_threads,
      [&](int64_t first, int64_t last) { kernels.dequantize(task, first, last); });
}

// Inputs are (address, stride) of codes, scales, residual codes and residual scales; outputs are
// either `values` or the four addresses of `requantized`. 0 stands for none.
void sum_blockwise(size_t isa, int64_t num_threads, int64_t num_shards, int64_t length,
                   const std::vector<std::pair<uintptr_t, int64_t>>& inputs, uintptr_t codebook,
                   float factor, uintptr_t values, const std::vector<uintptr_t>& requantized) {
  const auto& [codes, scales, residual_codes, residual_scales] =
      std::tie(inputs.at(0), inputs.at(1), inputs.at(2), inputs.at(3));
  const laconic::Sum task{num_shards,
                          length,
                          {pointer<const uint8_t>(codes.first), codes.second},
                          {pointer<const float>(scales.first), scales.second},
                          {pointer<const uint8_t>(residual_codes.first), residual_codes.second},
                          {pointer<const float>(residual_scales.first), residual_scales.second},
                          pointer<const laconic::Codebook>(codebook),
                          factor,
                          pointer<float>(values),
                          pointer<uint8_t>(requantized.at(0)),
                          pointer<float>(requantized.at(1)),
                          residual_codes.first ? pointer<uint8_t>(requantized.at(2)) : nullptr,
                          residual_codes.first ? pointer<float>(requantized.at(3)) : nullptr};
  const laconic::ReduceKernels& kernels = *laconic::supported_isas().at(isa).reduce;
  run(1, length, laconic::kGradientBlock, num_threads,
      [&](int64_t first, int64_t last) { kernels.sum(task, first, last); });
}

void accumulate_blockwise(size_t isa, int64_t num_threads, int64_t length, uintptr_t codes,
                          uintptr_t scales, uintptr_t residual_codes, uintptr_t residual_scales,
                          uintptr_t gradient, int gradient_type, float alpha) {
  const laconic::AccumulateKernels& kernels = *laconic::supported_isas().at(isa).accumulate;
  const laconic::Accumulate task{length,
                                 pointer<uint8_t>(codes),
                                 pointer<float>(scales),
                                 pointer<uint8_t>(residual_codes),
                                 pointer<float>(residual_scales),
                                 pointer<const void>(gradient),
                                 static_cast<FloatType>(gradient_type),
                                 alpha};
  run(1, length, laconic::kGradientBlock, num_threads,
      [&](int64_t first, int64_t last) { kernels.accumulate(task, first, last); });
}

double square_sum_blockwise(size_t isa, int64_t num_threads, int64_t length, uintptr_t codes,
                            uintptr_t scales, uintptr_t residual_codes, uintptr_t residual_scales) {
  const laconic::AccumulateKernels& kernels = *laconic::supported_isas().at(isa).accumulate;
  constexpr int64_t kPart = laconic::kSquarePart * laconic::kGradientBlock;
  std::vector<double> sums((length + kPart - 1) / kPart);
  const laconic::SquareSum task{length,
                                pointer<const uint8_t>(codes),
                                pointer<const float>(scales),
                                pointer<const uint8_t>(residual_codes),
                                pointer<const float>(residual_scales),
                                sums.data()};
  run(1, length, kPart, num_threads,
      [&](int64_t first, int64_t last) { kernels.square_sum(task, first, last); });
  return laconic::tree_sum(sums.data(), static_cast<int64_t>(sums.size()));
}

void adamw8bit(size_t isa, int64_t num_threads, int64_t rows, int64_t length, int bits,
               uintptr_t parameter, int parameter_type, const std::array<uintptr_t, 6>& moments, uintptr_t gradient,
               int gradient_type, const std::array<uintptr_t, 4>& quantized, uintptr_t factor,
               bool maximize, const std::array<float, 9>& scalars) {
  const laconic::AdamWKernels& kernels = *laconic::supported_isas().at(isa).adamw;
  const auto moment = [&](int i) {
    return laconic::Moment{pointer<uint8_t>(moments[i]), pointer<float>(moments[i + 1]),
                           pointer<const laconic::DynamicMap>(moments[i + 2])};
  };
  laconic::AdamW task{pointer<void>(parameter),
                      static_cast<FloatType>(parameter_type),
                      length,
                      bits,
                      moment(0),
                      moment(3),
                      pointer<const void>(gradient),
                      static_cast<FloatType>(gradient_type),
                      pointer<const uint8_t>(quantized[0]),
                      pointer<const float>(quantized[1]),
                      pointer<const uint8_t>(quantized[2]),
                      pointer<const float>(quantized[3]),
                      pointer<const float>(factor),
                      maximize,
                      {}};
  static_assert(sizeof(task.scalars) == sizeof(scalars));
  std::memcpy(&task.scalars, scalars.data(), sizeof(scalars));
  run(rows, length, laconic::state_block(bits), num_threads,
      [&](int64_t first, int64_t last) { kernels.update(task, first, last); });
}

uint64_t lossless_encode(size_t isa, int64_t num_threads, uintptr_t words, int type, int code,
                         uint64_t numel, const std::vector<uint64_t>& shape, uintptr_t message,
                         uint64_t message_nbytes, bool has_capacity) {
  const laconic::LosslessEncode task{static_cast<uint8_t>(type),
                                     static_cast<laconic::LosslessCode>(code),
                                     pointer<const uint8_t>(words),
                                     numel,
                                     static_cast<int>(shape.size()),
                                     shape.data(),
                                     pointer<uint8_t>(message),
                                     message_nbytes,
                                     has_capacity};
  return laconic::encode_message(*laconic::supported_isas().at(isa).lossless, num_threads, task);
}

// `out` has the type, or with `adds` it is the float32 total.
int lossless_decode(size_t isa, int64_t num_threads, uintptr_t message, uint64_t message_nbytes,
                    uint64_t numel, bool adds, int type, uintptr_t out) {
  const laconic::LosslessDecode task{pointer<const uint8_t>(message),
                                     message_nbytes,
                                     numel,
                                     adds,
                                     pointer<float>(out),
                                     static_cast<uint8_t>(type),
                                     pointer<uint8_t>(out)};
  return static_cast<int>(
      laconic::decode_message(*laconic::supported_isas().at(isa).lossless, num_threads, task));
}

using Coded = std::array<uint64_t, 3>;  // bytes of the blocks, both sums of the words

Coded entropy_encode(size_t isa, uintptr_t words, uint64_t numel, int itemsize, bool is_rotated,
                     uintptr_t blocks) {
  const laconic::Isa& kernels = laconic::supported_isas().at(isa);
  const laconic::EntropyWords kind{numel, itemsize, is_rotated};
  const std::unique_ptr<uint8_t[]> scratch(new uint8_t[laconic::entropy_scratch_nbytes(kind)]);
  const auto* const from = pointer<const uint8_t>(words);
  const laconic::WordSums sums = kernels.lossless->sums(from, numel * itemsize);
  return {kernels.entropy->encode(kind, from, scratch.get(), pointer<uint8_t>(blocks)), sums.sum,
          sums.weighted};
}

// kEntropyGuard bytes behind `nbytes` of the blocks have to be there. 0 bytes: damaged.
Coded entropy_decode(size_t isa, uintptr_t blocks, uint64_t nbytes, uint64_t numel, int itemsize,
                     bool is_rotated, uintptr_t words) {
  const laconic::Isa& kernels = laconic::supported_isas().at(isa);
  const laconic::EntropyWords kind{numel, itemsize, is_rotated};
  const std::unique_ptr<uint8_t[]> scratch(new uint8_t[laconic::entropy_scratch_nbytes(kind)]);
  const uint64_t used = kernels.entropy->decode(kind, pointer<const uint8_t>(blocks), nbytes,
                                                scratch.get(), pointer<uint8_t>(words));
  const laconic::WordSums sums =
      kernels.lossless->sums(pointer<const uint8_t>(words), used ? numel * itemsize : 0);
  return {used, sums.sum, sums.weighted};
}

// Returns whether every entry names a row and the offsets ascend from 0 to the number of entries; if
// not, nothing is written.
bool sum_rows(size_t isa, int64_t num_threads, uintptr_t rows, int type, int64_t num_rows,
              int64_t width, uintptr_t index, int64_t num_entries, uintptr_t offsets,
              int64_t num_sums, uintptr_t weights, uintptr_t sums) {
  const laconic::SumRows task{pointer<const void>(rows),
                              static_cast<FloatType>(type),
                              width,
                              pointer<const int64_t>(index),
                              pointer<const int64_t>(offsets),
                              pointer<const float>(weights),
                              pointer<void>(sums)};
  if (task.offsets[0] != 0 || task.offsets[num_sums] != num_entries) return false;
  for (int64_t i = 0; i < num_sums; ++i) {
    if (task.offsets[i] > task.offsets[i + 1]) return false;
  }
  for (int64_t i = 0; i < num_entries; ++i) {
    if (task.index[i] < 0 || task.index[i] >= num_rows) return false;
  }
  const laconic::RowsKernels& kernels = *laconic::supported_isas().at(isa).rows;
  run(num_sums, width, width, num_threads,
      [&](int64_t first, int64_t last) { kernels.sum(task, first, last); });
  return true;
}

// `packed`: gate's codes and scales, up's codes and scales. Without `grad` (0) the product goes to
// the first of `results`, else the gradients of gate and up to both.
void gated_blockwise(size_t isa, int64_t num_threads, const std::array<uintptr_t, 4>& packed,
                     int scale_type, int64_t rows, int64_t length, int64_t block_size,
                     uintptr_t grad, const std::array<uintptr_t, 2>& results, int type, int bits,
                     uintptr_t codebook, const std::array<float, 3>& curve) {
  const laconic::Gated task{pointer<const uint8_t>(packed[0]),
                            pointer<const void>(packed[1]),
                            pointer<const uint8_t>(packed[2]),
                            pointer<const void>(packed[3]),
                            static_cast<FloatType>(scale_type),
                            length,
                            block_size,
                            bits,
                            pointer<const laconic::Codebook>(codebook),
                            {curve[0], curve[1], curve[2]},
                            static_cast<FloatType>(type),
                            pointer<const void>(grad),
                            pointer<void>(results[0]),
                            pointer<void>(results[1])};
  const laconic::GatedKernels& kernels = *laconic::supported_isas().at(isa).gated;
  run(rows, length, block_size, num_threads,
      [&](int64_t first, int64_t last) { kernels.run(task, first, last); });
}

void linear_blockwise(size_t isa, int64_t num_threads, uintptr_t x, int64_t num_rows,
                      int64_t length, uintptr_t codes, uintptr_t scales, int scale_type,
                      int64_t block_size, int bits, uintptr_t codebook, int64_t num_outputs,
                      uintptr_t out, int out_type) {
  const laconic::Linear task{pointer<const float>(x),
                             num_rows,
                             length,
                             pointer<const uint8_t>(codes),
                             pointer<const void>(scales),
                             static_cast<FloatType>(scale_type),
                             block_size,
                             bits,
                             pointer<const laconic::Codebook>(codebook),
                             num_outputs,
                             pointer<void>(out),
                             static_cast<FloatType>(out_type)};
  const laconic::LinearKernels& kernels = *laconic::supported_isas().at(isa).linear;
  run(num_outputs, length, length, num_threads,
      [&](int64_t first, int64_t last) { kernels.run(task, first, last); });
}

// Norms over the rows of x; with `grad` the gradients of x, weight and bias in their place. Addresses
// are 0 where a tensor is not there or a gradient not wanted.
void norm(size_t isa, int64_t num_threads, uintptr_t x, int type, int64_t rows, int64_t length,
          uintptr_t weight, uintptr_t bias, bool unit_offset, bool centered, float eps,
          uintptr_t grad, uintptr_t out, uintptr_t of_weight, uintptr_t of_bias) {
  const laconic::NormKernels& kernels = *laconic::supported_isas().at(isa).norms;
  // A function of the number of rows alone, as what is summed in parts depends on it.
  const int64_t rows_of_part = std::clamp<int64_t>((rows + 63) / 64, 16, 128);
  const int64_t parts = (rows + rows_of_part - 1) / rows_of_part;
  std::vector<float> weight_parts(of_weight ? parts * length : 0);
  std::vector<float> bias_parts(of_bias ? parts * length : 0);
  const laconic::Norm task{pointer<const void>(x),
                           static_cast<FloatType>(type),
                           rows,
                           length,
                           pointer<const void>(weight),
                           pointer<const void>(bias),
                           unit_offset,
                           centered,
                           eps,
                           pointer<const void>(grad),
                           pointer<void>(out),
                           of_weight ? weight_parts.data() : nullptr,
                           of_bias ? bias_parts.data() : nullptr,
                           rows_of_part};
  const int64_t useful = rows * length / kElementsPerThread;
  laconic::parallel_for(grad ? parts : rows, std::min(useful, num_threads),
                        [&](int64_t first, int64_t last) {
                          (grad ? kernels.differentiate : kernels.normalize)(task, first, last);
                        });
  if (of_weight)
    kernels.sum_parts(weight_parts.data(), parts, length, task.type, pointer<void>(of_weight));
  if (of_bias)
    kernels.sum_parts(bias_parts.data(), parts, length, task.type, pointer<void>(of_bias));
}

void pack_bits(size_t isa, int64_t num_threads, uintptr_t x, int itemsize, uint64_t magnitude,
               int64_t length, uintptr_t codes) {
  const laconic::BitsKernels& kernels = *laconic::supported_isas().at(isa).bits;
  const laconic::PackBits task{pointer<const void>(x), itemsize, magnitude, length,
                               pointer<uint8_t>(codes)};
  run(1, length, laconic::kBitsGroup, num_threads,
      [&](int64_t first, int64_t last) { kernels.pack(task, first, last); });
}

void unpack_bits(size_t isa, int64_t num_threads, uintptr_t codes, int64_t length, int itemsize,
                 uint64_t zero, uint64_t one, uintptr_t values) {
  const laconic::BitsKernels& kernels = *laconic::supported_isas().at(isa).bits;
  const laconic::UnpackBits task{
      pointer<const uint8_t>(codes), length, itemsize, zero, one, pointer<void>(values)};
  run(1, length, laconic::kBitsGroup, num_threads,
      [&](int64_t first, int64_t last) { kernels.unpack(task, first, last); });
}

void select_bits(size_t isa, int64_t num_threads, uintptr_t x, uintptr_t codes, int64_t length,
                 int itemsize, uintptr_t values) {
  const laconic::BitsKernels& kernels = *laconic::supported_isas().at(isa).bits;
  const laconic::SelectBits task{pointer<const void>(x), pointer<const uint8_t>(codes), length,
                                 itemsize, pointer<void>(values)};
  run(1, length, laconic::kBitsGroup, num_threads,
      [&](int64_t first, int64_t last) { kernels.select(task, first, last); });
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.doc() = "C++ kernels of laconic.ops. `isa` arguments are positions in supported_isas().";
  m.def(
      "supported_isas",
      [] {
        std::vector<std::string> names;
        for (const laconic::Isa& isa : laconic::supported_isas()) names.emplace_back(isa.name);
        return names;
      },
      "Instruction sets that this CPU runs, slowest first.");
  m.def("adamw8bit", &adamw8bit, nb::call_guard<nb::gil_scoped_release>());
  m.def("quantize_blockwise", &quantize_blockwise, nb::call_guard<nb::gil_scoped_release>());
  m.def("dequantize_blockwise", &dequantize_blockwise, nb::call_guard<nb::gil_scoped_release>());
  m.def("sum_blockwise", &sum_blockwise, nb::call_guard<nb::gil_scoped_release>());
  m.def("accumulate_blockwise", &accumulate_blockwise, nb::call_guard<nb::gil_scoped_release>());
  m.def("lossless_encode", &lossless_encode, nb::call_guard<nb::gil_scoped_release>());
  m.def("lossless_decode", &lossless_decode, nb::call_guard<nb::gil_scoped_release>());
  m.def("entropy_encode", &entropy_encode, nb::call_guard<nb::gil_scoped_release>());
  m.def("entropy_decode", &entropy_decode, nb::call_guard<nb::gil_scoped_release>());
  m.def("gated_blockwise", &gated_blockwise, nb::call_guard<nb::gil_scoped_release>());
  m.def("linear_blockwise", &linear_blockwise, nb::call_guard<nb::gil_scoped_release>());
  m.def("sum_rows", &sum_rows, nb::call_guard<nb::gil_scoped_release>());
  m.def("norm", &norm, nb::call_guard<nb::gil_scoped_release>());
  m.def("pack_bits", &pack_bits, nb::call_guard<nb::gil_scoped_release>());
  m.def("unpack_bits", &unpack_bits, nb::call_guard<nb::gil_scoped_release>());
  m.def("select_bits", &select_bits, nb::call_guard<nb::gil_scoped_release>());
  m.def("square_sum_blockwise", &square_sum_blockwise, nb::call_guard<nb::gil_scoped_release>());
}
