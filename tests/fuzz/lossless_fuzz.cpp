// Fuzzes the C++ decoder of lossless messages under sanitizers: lossless_fuzz ROUNDS SEED.
//
// Messages are made by the encoder, changed, given a header_sum that fits again, and decoded from memory that ends
// where they end, into memory that ends where the values end, by every instruction set that this CPU runs. All must
// agree on the status and, where it is kSound, on the values. Prints how often each status came; exits with 1 when two
// decoders differ or an unchanged message does not come back.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "lossless_message.h"

namespace laconic {
// Those that are not built in stay null.
extern const LosslessKernels kLosslessAvx2 __attribute__((weak));
extern const LosslessKernels kLosslessAvx512 __attribute__((weak));
}  // namespace laconic

namespace {

using namespace laconic;

std::mt19937_64 dice;

uint64_t below(uint64_t n) { return n ? dice() % n : 0; }

// `nbytes` bytes whose last is the last of its allocation and whose first is at no particular alignment.
class Exact {
 public:
  explicit Exact(uint64_t nbytes) : skip_(below(9)), data_(new uint8_t[nbytes + skip_]) {}
  uint8_t* get() const { return data_.get() + skip_; }

 private:
  uint64_t skip_;
  std::unique_ptr<uint8_t[]> data_;
};

std::vector<const LosslessKernels*> decoders() {
  std::vector<const LosslessKernels*> found = {&kLosslessPortable};
#ifdef __x86_64__
  __builtin_cpu_init();
  if (&kLosslessAvx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) {
    found.push_back(&kLosslessAvx2);
  }
  if (&kLosslessAvx512 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vpopcntdq")) {
    found.push_back(&kLosslessAvx512);
  }
#endif
  return found;
}

struct Case {
  uint8_t type;
  uint64_t numel;
  int64_t num_threads;
  std::vector<uint8_t> words;
};

// Words whose exponents are near each other, with zeros, runs and noise mixed in.
Case make_case() {
  Case made;
  made.type = static_cast<uint8_t>(below(kLosslessNumTypes));
  if (15 <= made.type && made.type <= 17) made.type -= 3;  // parts of complex numbers come in pairs
  made.numel = below(4) ? below(700) : below(9000);
  made.num_threads = 1;
  if (below(100) == 0) {  // enough for more than one
    made.numel = (1 << 17) + below(9000);
    made.num_threads = 3;
  }
  const uint64_t itemsize = lossless_itemsize(kLosslessTypes[made.type]);
  made.words.resize(made.numel * itemsize);
  const uint64_t zeros = below(3) ? 0 : below(10), noise = below(3) ? 0 : below(10);
  const uint64_t low_bytes = itemsize == 4 ? below(3) : 0, spread = 1 + below(8);
  // Few values, far modes and constants: what is coded by rank.
  const uint64_t num_values = below(3) ? 0 : 1 + below(20), far = below(4) ? 0 : 1 + below(3);
  std::normal_distribution<float> normal;
  for (uint64_t i = 0; i < made.numel; ++i) {
    float value = normal(dice);
    for (uint64_t k = 0; k < below(spread); ++k) value *= 0.25f;
    if (far && i % (far + 1) == 0) value *= 1e-9f;
    uint64_t word = dice();
    if (itemsize == 8 && below(2)) word %= 3000;
    if (num_values) value = static_cast<float>(below(num_values));
    if (itemsize < 8) {
      word = 0;
      std::memcpy(&word, &value, 4);
    }
    if (itemsize == 4) {
      word &= ~0u << (8 * low_bytes);
    } else if (itemsize < 4) {
      word >>= itemsize == 2 ? 16 : 21;
    }
    if (below(10) < zeros) word = 0;
    if (below(20) < noise) word = dice();
    std::memcpy(&made.words[i * itemsize], &word, itemsize);
  }
  return made;
}

std::vector<uint8_t> encode(const LosslessKernels& kernels, const Case& made, LosslessCode code, uint64_t capacity) {
  const Exact words(made.words.size());
  if (!made.words.empty()) std::memcpy(words.get(), made.words.data(), made.words.size());
  const uint64_t longest = 128 + made.words.size() + 5 * ((made.numel + kLosslessBlock - 1) / kLosslessBlock);
  const uint64_t size = capacity ? capacity : longest;
  const Exact message(size);
  const uint64_t shape[1] = {made.numel};
  const LosslessEncode task = {made.type, code, words.get(), made.numel, 1, shape, message.get(), size, capacity != 0};
  const uint64_t nbytes = encode_message(kernels, made.num_threads, task);
  return {message.get(), message.get() + (capacity ? capacity : nbytes)};
}

LosslessStatus decode(const LosslessKernels& kernels, const std::vector<uint8_t>& bytes, const Case& made, bool adds,
                      std::vector<uint8_t>& result) {
  const Exact message(bytes.size());
  if (!bytes.empty()) std::memcpy(message.get(), bytes.data(), bytes.size());
  const std::unique_ptr<float[]> total(new float[adds ? made.numel : 0]());
  const Exact words(adds ? 0 : made.words.size());
  const LosslessDecode task = {message.get(), bytes.size(), made.numel, adds, total.get(), made.type, words.get()};
  const LosslessStatus status = decode_message(kernels, made.num_threads, task);
  if (status == LosslessStatus::kSound) {
    const uint8_t* const first = adds ? reinterpret_cast<const uint8_t*>(total.get()) : words.get();
    result.assign(first, first + (adds ? 4 * made.numel : made.words.size()));
  }
  return status;
}

void reseal(std::vector<uint8_t>& message) {
  if (message.size() < 64) return;
  uint64_t numel, front = 64 + 8 * uint64_t{message[7]};
  std::memcpy(&numel, &message[8], 8);
  if (message[6] == 1 || message[6] == 2) front += 5 * (numel / kLosslessBlock + (numel % kLosslessBlock != 0));
  if (front > message.size()) return;
  std::memset(&message[48], 0, 8);
  uint64_t sum = 0, weighted = 0;
  for (uint64_t i = 0; i < front; ++i) {
    const uint64_t part = uint64_t{message[i]} << (8 * (i % 4));
    sum += part;
    weighted += (i / 4 + 1) * part;
  }
  sum += weighted << 20;
  std::memcpy(&message[48], &sum, 8);
}

void change(std::vector<uint8_t>& message) {
  static const uint64_t kNumbers[] = {0, 1, 63, 64, 255, 4095, 4096, 65535, 1ull << 31, 1ull << 32, 1ull << 62, ~0ull};
  for (uint64_t times = 1 + below(3); times && !message.empty(); --times) {
    // The header, the lists behind it, or anywhere.
    const uint64_t part = below(6), end = part == 0 ? 72 : part < 3 ? 100 : message.size();
    const uint64_t place = below(std::min<uint64_t>(end, message.size()));
    switch (below(6)) {
      case 0:
      case 1:
        message[place] ^= 1 << below(8);
        break;
      case 2:
        message[place] = static_cast<uint8_t>(dice());
        break;
      case 3: {
        const uint64_t number = below(2) ? kNumbers[below(sizeof(kNumbers) / 8)] : message.size() + below(19) - 9;
        std::memcpy(&message[place], &number, std::min<uint64_t>(1ull << below(4), message.size() - place));
        break;
      }
      case 4:
        message.resize(below(message.size() + 1));
        break;
      default:
        message.insert(message.begin() + place, 1 + below(20), static_cast<uint8_t>(dice()));
        break;
    }
  }
}

[[noreturn]] void report(const char* what, const std::vector<uint8_t>& message) {
  std::printf("%s:", what);
  for (const uint8_t byte : message) std::printf(" %02x", byte);
  std::printf("\n");
  std::exit(1);
}

}  // namespace

int main(int count, char** arguments) {
  const uint64_t num_rounds = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1000;
  dice.seed(count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0);
  const auto isas = decoders();
  uint64_t num_messages = 0, num_statuses[13] = {};
  for (uint64_t round = 0; round < num_rounds; ++round) {
    const Case made = make_case();
    const auto code = static_cast<LosslessCode>(below(3));
    const uint64_t capacity = below(4) ? 0 : 72 + below(made.words.size() + 100);
    const std::vector<uint8_t> message = encode(*isas[0], made, code, capacity);
    for (const auto* isa : isas) {
      if (encode(*isa, made, code, capacity) != message) report("encoders differ", message);
      std::vector<uint8_t> words;
      const LosslessStatus status = decode(*isa, message, made, false, words);
      if (status != LosslessStatus::kTooLong && (status != LosslessStatus::kSound || words != made.words)) {
        report("a message does not come back", message);
      }
    }
    for (int i = 0; i < 20; ++i) {
      std::vector<uint8_t> changed = message;
      change(changed);
      if (below(8)) reseal(changed);
      const bool adds = below(4) == 0;
      std::vector<uint8_t> expected, words;
      const LosslessStatus status = decode(*isas[0], changed, made, adds, expected);
      for (const auto* isa : isas) {
        if (decode(*isa, changed, made, adds, words) != status) report("decoders differ in their status", changed);
        if (status == LosslessStatus::kSound && words != expected) report("decoders differ in values", changed);
      }
      ++num_statuses[static_cast<int>(status)];
      ++num_messages;
    }
  }
  std::printf("%zu instruction sets, %llu messages, by status:", isas.size(),
              static_cast<unsigned long long>(num_messages));
  for (const uint64_t number : num_statuses) std::printf(" %llu", static_cast<unsigned long long>(number));
  std::printf("\n");
  return 0;
}
