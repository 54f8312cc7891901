// Fuzzes the C++ decoder of entropy-coded blocks under sanitizers: entropy_fuzz ROUNDS SEED.
//
// Blocks are made by the encoder, changed, and decoded from memory that ends where their guard ends, into memory that
// ends where the words end, by every instruction set that this CPU runs. All must agree on how many bytes they took
// and, where that is not 0, on the words. Prints how many changed blocks were refused and taken; exits with 1 when two
// differ or unchanged blocks do not come back.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "entropy.h"

namespace laconic {
extern const EntropyKernels kEntropyAvx2 __attribute__((weak));  // null where it is not built in
}

namespace {

using namespace laconic;

std::mt19937_64 dice;

uint64_t below(uint64_t n) { return n ? dice() % n : 0; }

std::vector<const EntropyKernels*> isas() {
  std::vector<const EntropyKernels*> found = {&kEntropyPortable};
#ifdef __x86_64__
  __builtin_cpu_init();
  if (&kEntropyAvx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) found.push_back(&kEntropyAvx2);
#endif
  return found;
}

// A copy whose last byte is the last of its allocation, at no particular alignment.
class Exact {
 public:
  explicit Exact(uint64_t nbytes) : skip_(below(9)), data_(new uint8_t[nbytes + skip_]) {}
  explicit Exact(const std::vector<uint8_t>& bytes) : Exact(bytes.size()) {
    if (!bytes.empty()) std::memcpy(get(), bytes.data(), bytes.size());
  }
  uint8_t* get() const { return data_.get() + skip_; }

 private:
  uint64_t skip_;
  std::unique_ptr<uint8_t[]> data_;
};

std::vector<uint8_t> make_words(EntropyWords& kind) {
  kind.itemsize = 1 << below(4);
  kind.is_rotated = (kind.itemsize == 2 || kind.itemsize == 4) && below(2);
  kind.numel = below(50) ? below(3000) : kEntropyBlock + below(20000);
  std::vector<uint8_t> words(kind.numel * kind.itemsize);
  const uint64_t zeros = below(2) ? 0 : below(20), num_values = below(3) ? 256 : 1 + below(30);
  std::normal_distribution<float> normal;
  const bool is_float = below(2);
  for (uint64_t i = 0; i < kind.numel; ++i) {
    uint64_t word = 0;
    if (is_float) {
      const float value = normal(dice);
      std::memcpy(&word, &value, 4);
      if (kind.itemsize < 4) word >>= 32 - 8 * kind.itemsize;
    } else {
      for (int k = 0; k < kind.itemsize; ++k) word = word << 8 | below(num_values) * below(num_values) % 256;
    }
    if (below(20) < zeros) word = 0;
    std::memcpy(&words[i * kind.itemsize], &word, kind.itemsize);
  }
  return words;
}

std::vector<uint8_t> encode(const EntropyKernels& kernels, const EntropyWords& kind, const std::vector<uint8_t>& words) {
  const uint64_t num_blocks = (kind.numel + kEntropyBlock - 1) / kEntropyBlock;
  const Exact from(words), scratch(entropy_scratch_nbytes(kind));
  const Exact blocks(words.size() + kind.numel / 8 + num_blocks * (kind.itemsize + 3));
  const uint64_t nbytes = kernels.encode(kind, from.get(), scratch.get(), blocks.get());
  return {blocks.get(), blocks.get() + nbytes};
}

uint64_t decode(const EntropyKernels& kernels, const EntropyWords& kind, std::vector<uint8_t> blocks,
                std::vector<uint8_t>& words) {
  const uint64_t nbytes = blocks.size();
  blocks.resize(nbytes + kEntropyGuard);
  const Exact from(blocks), scratch(entropy_scratch_nbytes(kind)), to(kind.numel * kind.itemsize);
  const uint64_t used = kernels.decode(kind, from.get(), nbytes, scratch.get(), to.get());
  words.assign(to.get(), to.get() + (used ? kind.numel * kind.itemsize : 0));
  return used;
}

void change(std::vector<uint8_t>& blocks) {
  for (uint64_t times = 1 + below(3); times && !blocks.empty(); --times) {
    const uint64_t place = below(std::min<uint64_t>(below(3) ? 60 : blocks.size(), blocks.size()));
    switch (below(4)) {
      case 0:
        blocks[place] ^= 1 << below(8);
        break;
      case 1:
        blocks[place] = static_cast<uint8_t>(dice());
        break;
      case 2:
        blocks.resize(below(blocks.size() + 1));
        break;
      default:
        blocks.insert(blocks.begin() + place, 1 + below(20), static_cast<uint8_t>(dice()));
        break;
    }
  }
}

[[noreturn]] void report(const char* what, const EntropyWords& kind, const std::vector<uint8_t>& blocks) {
  std::printf("%s, %llu words of %d:", what, static_cast<unsigned long long>(kind.numel), kind.itemsize);
  for (const uint8_t byte : blocks) std::printf(" %02x", byte);
  std::printf("\n");
  std::exit(1);
}

}  // namespace

int main(int count, char** arguments) {
  const uint64_t num_rounds = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1000;
  dice.seed(count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0);
  const auto found = isas();
  uint64_t refused = 0, taken = 0;
  for (uint64_t round = 0; round < num_rounds; ++round) {
    EntropyWords kind;
    const std::vector<uint8_t> words = make_words(kind);
    const std::vector<uint8_t> blocks = encode(*found[0], kind, words);
    std::vector<uint8_t> back, expected;
    for (const auto* isa : found) {
      if (encode(*isa, kind, words) != blocks) report("encoders differ", kind, blocks);
      if (decode(*isa, kind, blocks, back) != blocks.size() || back != words) report("blocks do not come back", kind, blocks);
    }
    for (int i = 0; i < 20; ++i) {
      std::vector<uint8_t> changed = blocks;
      change(changed);
      const uint64_t used = decode(*found[0], kind, changed, expected);
      for (const auto* isa : found) {
        if (decode(*isa, kind, changed, back) != used) report("decoders differ", kind, changed);
        if (back != expected) report("decoders differ in words", kind, changed);
      }
      ++(used ? taken : refused);
    }
  }
  std::printf("%zu instruction sets, refused %llu, taken %llu\n", found.size(), static_cast<unsigned long long>(refused),
              static_cast<unsigned long long>(taken));
  return 0;
}
