// Looks for data races in the C++ kernels under ThreadSanitizer: threads_race ROUNDS SEED.
//
// Several threads call the pool at the same time, as background executors of collectives do: parallel_for by itself,
// block-wise codes there and back, lossless messages there and back. Each result is compared with one thread's. A
// forked child, which has none of the pool's threads, does the same. Exits with 1 when a result differs; a race makes
// ThreadSanitizer exit with its own code.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "blockwise.h"
#include "lossless_message.h"
#include "parallel.h"

namespace {

using namespace laconic;

constexpr int kCallers = 3;
constexpr int64_t kThreads[] = {1, 2, 3, 5};

std::atomic<bool> failed{false};

void check(bool holds, const char* what) {
  if (!holds) {
    std::printf("%s\n", what);
    failed = true;
  }
}

void parts(std::mt19937_64& dice, int64_t num_threads) {
  const int64_t count = 1 + dice() % 2000;
  std::vector<int> visits(count, 0);  // plain: a part that two threads get is a race
  parallel_for(count, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) ++visits[i];
  });
  for (const int number : visits) check(number == 1, "parallel_for left an item out or did it twice");
}

std::vector<float> normal_values(std::mt19937_64& dice, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(dice);
  return values;
}

void blockwise(std::mt19937_64& dice, int64_t num_threads) {
  const int64_t length = 1 + dice() % 30000, block_size = 128, blocks = (length + 127) / 128;
  const std::vector<float> x = normal_values(dice, length);
  const auto codes_by = [&](int64_t threads, std::vector<uint8_t>& codes, std::vector<float>& scales) {
    codes.assign(length, 0);
    scales.assign(blocks, 0);
    const Quantize task{x.data(), FloatType::kFloat32, length, length, block_size, codes.data(), scales.data(),
                        FloatType::kFloat32, 8, 127.0f, nullptr, true, 7, 0, nullptr};
    parallel_for(blocks, threads, [&](int64_t first, int64_t last) { kBlockwisePortable.quantize(task, first, last); });
  };
  std::vector<uint8_t> expected, codes;
  std::vector<float> expected_scales, scales, values(length);
  codes_by(1, expected, expected_scales);
  codes_by(num_threads, codes, scales);
  check(codes == expected && scales == expected_scales, "codes depend on the number of threads");
  const Dequantize task{codes.data(), scales.data(), FloatType::kFloat32, length, block_size, values.data(),
                        FloatType::kFloat32, 8, nullptr, nullptr};
  parallel_for(blocks, num_threads,
               [&](int64_t first, int64_t last) { kBlockwisePortable.dequantize(task, first, last); });
  for (int64_t i = 0; i < length; ++i) {
    check(std::fabs(values[i] - x[i]) <= 1.001f * scales[i / block_size], "a value is further away than a level");
  }
}

void lossless(std::mt19937_64& dice, int64_t num_threads) {
  // From this many elements on a message has more than one thread.
  const uint64_t numel = (uint64_t{1} << 16) * num_threads + dice() % 3000;
  const std::vector<float> words = normal_values(dice, numel);
  const auto* const bytes = reinterpret_cast<const uint8_t*>(words.data());
  const auto encode = [&](int64_t threads) {
    std::vector<uint8_t> message(128 + 4 * numel + 5 * ((numel + kLosslessBlock - 1) / kLosslessBlock));
    const uint64_t shape[1] = {numel};
    const LosslessEncode task = {3,     static_cast<LosslessCode>(numel % 3), bytes, numel, 1, shape, message.data(),
                                 message.size(), false};
    message.resize(encode_message(kLosslessPortable, threads, task));
    return message;
  };
  const std::vector<uint8_t> message = encode(num_threads);
  check(message == encode(1), "a message depends on the number of threads");
  for (const bool adds : {false, true}) {
    std::vector<float> result(numel, 0.0f);
    const LosslessDecode task = {message.data(), message.size(), numel, adds, adds ? result.data() : nullptr, 3,
                                 adds ? nullptr : reinterpret_cast<uint8_t*>(result.data())};
    check(decode_message(kLosslessPortable, num_threads, task) == LosslessStatus::kSound, "a message is not sound");
    check(std::memcmp(result.data(), bytes, 4 * numel) == 0, "a message does not come back");
  }
}

void call(uint64_t rounds, uint64_t seed) {
  std::mt19937_64 dice(seed);
  for (uint64_t round = 0; round < rounds; ++round) {
    const int64_t num_threads = kThreads[dice() % 4];
    parts(dice, num_threads);
    blockwise(dice, num_threads);
    if (round % 8 == 0) lossless(dice, num_threads);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const uint64_t rounds = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 100;
  const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0;
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) callers.emplace_back(call, rounds, seed * kCallers + i);
  for (std::thread& caller : callers) caller.join();
  if (const pid_t child = fork(); child == 0) {
    call(rounds / 10 + 1, seed + 1);
    std::_Exit(failed ? 1 : 0);
  } else {
    int status = 0;
    waitpid(child, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the forked child failed");
  }
  std::printf("%d callers, %llu rounds each: %s\n", kCallers, static_cast<unsigned long long>(rounds),
              failed ? "wrong" : "all the same");
  return failed ? 1 : 0;
}
