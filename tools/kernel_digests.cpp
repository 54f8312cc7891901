// Runs every family of the portable kernels on made-up inputs and prints a digest of each result.
// tools/aarch64.py compiles it for two machines and compares what it prints. The argument is a file
// of tables: fp32, codebooks (97 numbers each) of nf4, e2m1 and int4, then both dynamic maps (290).
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "../csrc/kernels/isa.h"
#include "../csrc/kernels/lossless_message.h"
#include "../csrc/kernels/parallel.h"

using namespace laconic;

namespace {

constexpr int64_t kRows = 3, kLength = 4096 + 77;  // rows end within a block
constexpr FloatType kTypes[] = {FloatType::kFloat32, FloatType::kBFloat16, FloatType::kFloat16};

uint64_t state = 88172645463325252ull;

uint32_t random_word() {  // xorshift64*
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return static_cast<uint32_t>(state * 2685821657736338717ull >> 32);
}

// A sum of uniform numbers, some of them huge, tiny, zero or denormal. No libm: it differs.
float random_float() {
  const uint32_t kind = random_word() % 64;
  if (kind == 0) return 0.0f;
  if (kind == 1) return -0.0f;
  float sum = 0.0f;
  for (int i = 0; i < 4; i++) sum += static_cast<float>(random_word() >> 8) * 0x1p-24f - 0.5f;
  return kind == 2 ? sum * 0x1p13f : kind == 3 ? sum * 0x1p-13f : kind == 4 ? sum * 0x1p-130f : sum;
}

int itemsize(FloatType type) { return type == FloatType::kFloat32 ? 4 : 2; }

std::vector<uint8_t> random_values(FloatType type, int64_t count) {
  std::vector<uint8_t> bytes(count * itemsize(type));
  for (int64_t i = 0; i < count; i++) {
    const float x = random_float();
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (type == FloatType::kFloat32) {
      std::memcpy(&bytes[4 * i], &bits, 4);
    } else if (type == FloatType::kBFloat16) {
      const uint16_t half = static_cast<uint16_t>(bits >> 16);
      std::memcpy(&bytes[2 * i], &half, 2);
    } else {  // any half but infinities and NaN
      uint16_t half = static_cast<uint16_t>(random_word());
      if ((half & 0x7c00) == 0x7c00) half &= 0xbfff;
      std::memcpy(&bytes[2 * i], &half, 2);
    }
  }
  return bytes;
}

std::vector<float> random_scales(int64_t count) {
  std::vector<float> scales(count);
  for (float& s : scales) s = std::fabs(random_float()) + 0x1p-8f;
  return scales;
}

std::vector<uint8_t> random_bytes(int64_t count) {
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random_word());
  return bytes;
}

template <class T>
void print(const std::string& name, const std::vector<T>& result) {
  uint64_t hash = 1469598103934665603ull;  // FNV-1a
  const auto* bytes = reinterpret_cast<const uint8_t*>(result.data());
  for (size_t i = 0; i < result.size() * sizeof(T); i++) hash = (hash ^ bytes[i]) * 1099511628211ull;
  std::printf("%016llx  %s\n", static_cast<unsigned long long>(hash), name.c_str());
}

int64_t blocks_of(int64_t length, int64_t block) { return (length + block - 1) / block; }

void all(int64_t count, const std::function<void(int64_t, int64_t)>& work) {
  parallel_for(count, 2, work);
}

void blockwise(const Isa& isa, const Codebook* books) {
  const struct { const char* name; int bits; float level_max; const Codebook* book; } codes[] = {
      {"uint2", 2, 3.0f, nullptr},  {"nf4", 4, 1.0f, &books[0]},   {"e2m1", 4, 6.0f, &books[1]},
      {"int4", 4, 7.0f, &books[2]}, {"int5", 5, 15.0f, nullptr},   {"int6", 6, 31.0f, nullptr},
      {"int8", 8, 127.0f, nullptr}};
  for (const auto& code : codes)
    for (const FloatType type : kTypes)
      for (const int64_t block : {16, 64, 256})
        for (const bool stochastic : {false, true}) {
          const auto x = random_values(type, kRows * kLength);
          const int64_t num_scales = kRows * blocks_of(kLength, block) * (code.bits == 2 ? 2 : 1);
          const auto center = random_scales(kLength);
          std::vector<uint8_t> packed(kRows * blocks_of(kLength * code.bits, 8));
          std::vector<uint8_t> scales(num_scales * itemsize(type)), back(x.size());
          const Quantize task{x.data(), type, kLength, kLength, block, packed.data(), scales.data(), type, code.bits,
                              code.level_max, code.book, stochastic, 7, 11, stochastic ? center.data() : nullptr,
                              nullptr, nullptr};
          const int64_t count = kRows * blocks_of(kLength, block);
          all(count, [&](int64_t a, int64_t b) { isa.blockwise->quantize(task, a, b); });
          const Dequantize inverse{packed.data(), scales.data(), type, kLength, block, back.data(), type, code.bits,
                                   code.book, stochastic ? center.data() : nullptr};
          all(count, [&](int64_t a, int64_t b) { isa.blockwise->dequantize(inverse, a, b); });
          const std::string name = std::string(code.name) + " type " + std::to_string(static_cast<int>(type)) +
                                   " block " + std::to_string(block) + (stochastic ? " stochastic" : "");
          print("quantize codes " + name, packed);
          print("quantize scales " + name, scales);
          print("dequantize " + name, back);
          if (code.bits == 2) continue;
          for (const bool backward : {false, true}) {
            const auto grad = random_values(type, kRows * kLength);
            std::vector<uint8_t> first(x.size()), second(x.size());
            const Gated gated{packed.data(), scales.data(), packed.data(), scales.data(), type, kLength, block,
                              code.bits, code.book, {1.0f, 0.0f, 0.0f}, type, backward ? grad.data() : nullptr,
                              first.data(), backward ? second.data() : nullptr};
            all(count, [&](int64_t a, int64_t b) { isa.gated->run(gated, a, b); });
            print(std::string("gated ") + (backward ? "backward " : "forward ") + name, first);
            print(std::string("gated second ") + (backward ? "backward " : "forward ") + name, second);
          }
        }
}

void gradients(const Isa& isa, const Codebook* int4) {
  const int64_t blocks = blocks_of(kLength, kGradientBlock);
  for (const bool residual : {false, true})
    for (const FloatType type : kTypes) {
      auto codes = random_bytes(kLength), low = random_bytes((kLength + 1) / 2);
      for (uint8_t& code : codes) code = code == 0x80 ? 0x81 : code;
      auto scales = random_scales(blocks), low_scales = random_scales(blocks);
      const auto gradient = random_values(type, kLength);
      const Accumulate task{kLength, codes.data(), scales.data(), residual ? low.data() : nullptr,
                            residual ? low_scales.data() : nullptr, gradient.data(), type, 0.75f};
      all(blocks, [&](int64_t a, int64_t b) { isa.accumulate->accumulate(task, a, b); });
      const std::string name = std::to_string(static_cast<int>(type)) + (residual ? " residual" : "");
      print("accumulate codes " + name, codes);
      print("accumulate scales " + name, scales);
      print("accumulate residual codes " + name, low);
      print("accumulate residual scales " + name, low_scales);
      std::vector<double> sums(blocks_of(blocks, kSquarePart));  // a part is of blocks
      const SquareSum square{kLength, codes.data(), scales.data(), residual ? low.data() : nullptr,
                             residual ? low_scales.data() : nullptr, sums.data()};
      all(sums.size(), [&](int64_t a, int64_t b) { isa.accumulate->square_sum(square, a, b); });
      sums.push_back(tree_sum(sums.data(), sums.size()));
      print("square sum " + name, sums);
      const int64_t shards = 4;
      const auto many = random_bytes(shards * kLength), many_low = random_bytes(shards * ((kLength + 1) / 2));
      const auto many_scales = random_scales(shards * blocks), many_low_scales = random_scales(shards * blocks);
      std::vector<float> values(kLength), new_scales(blocks), new_low_scales(blocks);
      std::vector<uint8_t> new_codes(kLength), new_low((kLength + 1) / 2);
      const Rows<uint8_t> none{nullptr, 0};
      const Rows<float> no_scales{nullptr, 0};
      for (const bool dense : {true, false}) {
        const Sum sum{shards, kLength, {many.data(), kLength}, {many_scales.data(), blocks},
                      residual ? Rows<uint8_t>{many_low.data(), (kLength + 1) / 2} : none,
                      residual ? Rows<float>{many_low_scales.data(), blocks} : no_scales, int4, 0.25f,
                      dense ? values.data() : nullptr, new_codes.data(), new_scales.data(),
                      residual ? new_low.data() : nullptr, residual ? new_low_scales.data() : nullptr};
        all(blocks, [&](int64_t a, int64_t b) { isa.reduce->sum(sum, a, b); });
      }
      print("reduce values " + name, values);
      print("reduce codes " + name, new_codes);
      print("reduce scales " + name, new_scales);
      print("reduce residual codes " + name, new_low);
      print("reduce residual scales " + name, new_low_scales);
    }
}

void optimizer(const Isa& isa, const DynamicMap* maps) {
  const int64_t blocks = kRows * blocks_of(kLength, state_block(8));
  for (const FloatType type : kTypes) {
    auto parameter = random_values(type, kRows * kLength), gradient = random_values(type, kRows * kLength);
    std::vector<uint8_t> first(kRows * kLength, 128), second(kRows * kLength, 0);
    std::vector<float> first_scales(blocks), second_scales(blocks);
    const AdamWScalars scalars{0.9f, 0.1f, 0.95f, 0.05f, 1.5f, 4.0f, 1e-8f, 0.999f, 1e-3f};
    for (int step = 0; step < 3; step++) {
      const AdamW task{parameter.data(), type, kLength, 8, {first.data(), first_scales.data(), &maps[0]},
                       {second.data(), second_scales.data(), &maps[1]}, gradient.data(), type,
                       nullptr, nullptr, nullptr, nullptr, nullptr, step == 2, scalars};
      all(blocks, [&](int64_t a, int64_t b) { isa.adamw->update(task, a, b); });
    }
    const std::string name = std::to_string(static_cast<int>(type));
    print("adamw parameter " + name, parameter);
    print("adamw first " + name, first);
    print("adamw first scales " + name, first_scales);
    print("adamw second " + name, second);
    print("adamw second scales " + name, second_scales);
  }
}

void rows_and_bits(const Isa& isa) {
  const std::vector<int64_t> index{2, 0, 1, 1, 2, 0, 0}, offsets{0, 2, 3, 3, 7};
  const auto weights = random_scales(index.size());
  for (const FloatType type : kTypes) {
    const auto rows = random_values(type, kRows * kLength);
    std::vector<uint8_t> sums((offsets.size() - 1) * kLength * itemsize(type));
    const SumRows task{rows.data(), type, kLength, index.data(), offsets.data(), weights.data(), sums.data()};
    all(offsets.size() - 1, [&](int64_t a, int64_t b) { isa.rows->sum(task, a, b); });
    print("rows " + std::to_string(static_cast<int>(type)), sums);
  }
  for (const int size : {1, 2, 4, 8}) {
    auto x = random_bytes(kLength * size);
    for (int64_t i = 0; i < kLength; i += 3) std::memset(&x[i * size], 0, size);
    std::vector<uint8_t> codes(blocks_of(kLength, 8)), values(x.size()), selected(x.size());
    const uint64_t magnitude = ~0ull >> (64 - 8 * size) >> 1;
    const PackBits pack{x.data(), size, magnitude, kLength, codes.data()};
    const UnpackBits unpack{codes.data(), kLength, size, 3, 5, values.data()};
    const SelectBits select{x.data(), codes.data(), kLength, size, selected.data()};
    const int64_t groups = blocks_of(kLength, kBitsGroup);
    all(groups, [&](int64_t a, int64_t b) { isa.bits->pack(pack, a, b); });
    all(groups, [&](int64_t a, int64_t b) { isa.bits->unpack(unpack, a, b); });
    all(groups, [&](int64_t a, int64_t b) { isa.bits->select(select, a, b); });
    print("bits pack " + std::to_string(size), codes);
    print("bits unpack " + std::to_string(size), values);
    print("bits select " + std::to_string(size), selected);
  }
}

bool messages(const Isa& isa) {
  bool sound = true;
  for (const uint8_t type : {0, 1, 2, 3, 4, 8, 10, 12})
    for (const LosslessCode code : {LosslessCode::kRaw, LosslessCode::kWindow, LosslessCode::kTiered}) {
      const int size = lossless_itemsize(kLosslessTypes[type]);
      const uint64_t numel = 3 * kLosslessBlock + 77, shape[] = {numel};
      auto words = random_bytes(numel * size);
      if (type == 1 || type == 2) words = random_values(kTypes[type], numel);
      if (type == 3) words = random_values(FloatType::kFloat32, numel);
      std::vector<uint8_t> message(words.size() + 8 * kLosslessBlock), back(words.size());
      const LosslessEncode task{type, code, words.data(), numel, 1, shape, message.data(), message.size(), false};
      message.resize(encode_message(*isa.lossless, 2, task));
      const LosslessDecode inverse{message.data(), message.size(), numel, false, nullptr, type, back.data()};
      const auto status = decode_message(*isa.lossless, 2, inverse);
      sound = sound && status == LosslessStatus::kSound && back == words;
      const std::string name = std::to_string(type) + " code " + std::to_string(static_cast<int>(code));
      print("message " + name + ", " + std::to_string(message.size()) + " bytes", message);
      if (type >= 1 && type <= 4) {
        std::vector<float> total(numel, 1.0f);
        const LosslessDecode adds{message.data(), message.size(), numel, true, total.data(), type, nullptr};
        sound = sound && decode_message(*isa.lossless, 2, adds) == LosslessStatus::kSound;
        print("message added " + name, total);
      }
      message[message.size() / 2] ^= 4;
      sound = sound && decode_message(*isa.lossless, 2, inverse) != LosslessStatus::kSound;
    }
  return sound;
}

bool entropy(const Isa& isa) {
  bool sound = true;
  for (const int itemsize : {1, 2, 4, 8}) {
    const EntropyWords words{kLength * kRows, itemsize, itemsize == 2 || itemsize == 4};
    auto data = random_bytes(words.numel * words.itemsize);
    if (words.itemsize == 2) data = random_values(FloatType::kBFloat16, words.numel);
    if (words.itemsize == 4) data = random_values(FloatType::kFloat32, words.numel);
    std::vector<uint8_t> blocks(2 * data.size() + 64), back(data.size());
    std::vector<uint8_t> scratch(entropy_scratch_nbytes(words));
    blocks.resize(isa.entropy->encode(words, data.data(), scratch.data(), blocks.data()) + kEntropyGuard);
    const uint64_t nbytes = blocks.size() - kEntropyGuard;
    sound = sound && isa.entropy->decode(words, blocks.data(), nbytes, scratch.data(), back.data()) == nbytes;
    sound = sound && back == data;
    print("entropy " + std::to_string(words.itemsize) + ", " + std::to_string(nbytes) + " bytes", blocks);
  }
  return sound;
}

}  // namespace

int main(int count, char** arguments) {
  static Codebook books[3];
  static DynamicMap maps[2];
  static_assert(sizeof(books) == 3 * 97 * 4 && sizeof(maps) == 2 * 290 * 4, "the tables are packed");
  std::ifstream file(count == 2 ? arguments[1] : "", std::ios::binary);
  file.read(reinterpret_cast<char*>(books), sizeof(books));
  file.read(reinterpret_cast<char*>(maps), sizeof(maps));
  if (!file) return std::fprintf(stderr, "usage: kernel_digests TABLES\n"), 2;
  const Isa& isa = supported_isas().front();
  blockwise(isa, books);
  gradients(isa, &books[2]);
  optimizer(isa, maps);
  rows_and_bits(isa);
  if (!messages(isa)) return std::fprintf(stderr, "a message did not come back, or damage was not seen\n"), 1;
  if (!entropy(isa)) return std::fprintf(stderr, "entropy-coded words did not come back\n"), 1;
  return 0;
}
