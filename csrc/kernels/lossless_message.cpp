#include "lossless_message.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "lossless-inl.h"
#include "parallel.h"

namespace laconic {
namespace {

constexpr uint64_t kHeaderNbytes = 64, kEntryNbytes = 5;
constexpr char kMagic[4] = {'L', 'C', 'N', 'Z'};
constexpr uint8_t kVersion = 1, kRankedVersion = 2, kTooLong = 255;
constexpr int kMaxDims = 8;

constexpr bool is_complex(int number) { return 15 <= number && number <= 17; }
constexpr int kChunk = 16;                        // blocks that a thread takes at a time
constexpr uint64_t kElementsPerThread = 1 << 16;  // waking a thread takes about as long

struct Header {
  char magic[4];
  uint8_t version, type, code, num_dims;
  uint64_t numel, nbytes, capacity, sum, weighted_sum, header_sum, reserved;
};
static_assert(sizeof(Header) == kHeaderNbytes);

uint64_t num_blocks_of(uint64_t numel) {
  return numel / kLosslessBlock + (numel % kLosslessBlock != 0);
}

int64_t useful_threads(uint64_t numel, int64_t num_threads) {
  return std::max<int64_t>(1, std::min<int64_t>(numel / kElementsPerThread, num_threads));
}

// The lists of lengths, kinds, bases and nests, which need not be aligned.
template <class Byte>
struct Directory {
  Byte* first;
  uint64_t num_blocks;
  LosslessBlock get(uint64_t b) const {
    LosslessBlock block;
    std::memcpy(&block.length, first + 2 * b, 2);
    block.kind = first[2 * num_blocks + b];
    block.base = first[3 * num_blocks + b];
    block.nest = first[4 * num_blocks + b];
    return block;
  }
  void set(uint64_t b, const LosslessBlock& block) const {
    std::memcpy(first + 2 * b, &block.length, 2);
    first[2 * num_blocks + b] = block.kind;
    first[3 * num_blocks + b] = block.base;
    first[4 * num_blocks + b] = block.nest;
  }
};

// Sums that threads add to.
class SharedSums {
 public:
  void add(const WordSums& sums) {
    sum_.fetch_add(sums.sum, std::memory_order_relaxed);
    weighted_.fetch_add(sums.weighted, std::memory_order_relaxed);
  }
  WordSums get() const { return {sum_.load(), weighted_.load()}; }

 private:
  std::atomic<uint64_t> sum_{0}, weighted_{0};
};

// Blocks of a tensor.
struct Blocks {
  uint64_t numel, itemsize;
  uint64_t count() const { return num_blocks_of(numel); }
  int size(uint64_t b) const {
    return static_cast<int>(std::min<uint64_t>(kLosslessBlock, numel - b * kLosslessBlock));
  }
  uint64_t offset_nbytes(uint64_t b) const { return b * kLosslessBlock * itemsize; }
  uint64_t first_word(uint64_t b) const { return b * (kLosslessBlock / 4) * itemsize; }
};

// Encodes all blocks one behind the other from `begin` on, and their entries. Returns where they
// end; beyond `limit` means that they did not fit, and what was written is of no use.
uint64_t encode_blocks(const LosslessKernels& kernels, int64_t num_threads,
                       const LosslessEncode& task, const Blocks& blocks,
                       const Directory<uint8_t>& directory, uint64_t begin, uint64_t limit,
                       SharedSums& shared) {
  const auto encode_one = [&](uint64_t b, uint8_t* payload, WordSums& sums) {
    const uint8_t* const words = task.words + blocks.offset_nbytes(b);
    WordSums own;
    const LosslessBlock block =
        kernels.encode(kLosslessTypes[task.type], task.code, words, blocks.size(b), payload, own);
    sums.add(own, blocks.first_word(b));
    directory.set(b, block);
    return block.length;
  };
  if (num_threads == 1) {
    // Straight into place as long as there is room for whatever a block may write.
    uint64_t end = begin;
    WordSums sums;
    parallel_for(blocks.count(), 1, [&](int64_t first, int64_t last) {
      uint8_t scratch[kLosslessPayloadBound];
      for (int64_t b = first; b < last; ++b) {
        if (end <= limit && limit - end >= kLosslessPayloadBound) {
          end += encode_one(b, task.message + end, sums);
        } else {
          const uint64_t length = encode_one(b, scratch, sums);
          if (end + length <= limit) std::memcpy(task.message + end, scratch, length);
          end += length;
        }
      }
    });
    shared.add(sums);
    return end;
  }
  // Threads take chunks in order and encode each to memory of their own. Where it belongs is known
  // when the chunk before is encoded, which has begun earlier; copying is done side by side again.
  const uint64_t num_chunks = (blocks.count() + kChunk - 1) / kChunk;
  constexpr uint64_t kScratch = kChunk * kLosslessPayloadBound;
  const std::unique_ptr<uint8_t[]> scratch(new uint8_t[num_threads * kScratch]);
  std::atomic<uint64_t> next_scratch{0}, next_chunk{0}, turn{0};
  uint64_t end = begin;  // belongs to the thread whose turn it is
  parallel_for(num_threads, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      uint8_t* const own = scratch.get() + next_scratch.fetch_add(1) * kScratch;
      WordSums sums;
      for (uint64_t chunk; (chunk = next_chunk.fetch_add(1)) < num_chunks;) {
        uint64_t nbytes = 0;
        const uint64_t stop = std::min(blocks.count(), (chunk + 1) * kChunk);
        for (uint64_t b = chunk * kChunk; b < stop; ++b)
          nbytes += encode_one(b, own + nbytes, sums);
        for (int spins = 0; turn.load(std::memory_order_acquire) != chunk; ++spins) {
          if (spins >= 1000) std::this_thread::yield();
        }
        const uint64_t start = end;
        end += nbytes;
        turn.store(chunk + 1, std::memory_order_release);
        if (start + nbytes <= limit) std::memcpy(task.message + start, own, nbytes);
      }
      shared.add(sums);
    }
  });
  return end;
}

WordSums sums_of(const LosslessKernels& kernels, int64_t num_threads, const uint8_t* words,
                 const Blocks& blocks) {
  SharedSums shared;
  parallel_for(blocks.count(), num_threads, [&](int64_t first, int64_t last) {
    const uint64_t begin = blocks.offset_nbytes(first);
    const uint64_t end = std::min(blocks.offset_nbytes(last), blocks.numel * blocks.itemsize);
    WordSums sums;
    sums.add(kernels.sums(words + begin, end - begin), blocks.first_word(first));
    shared.add(sums);
  });
  return shared.get();
}

// Over a message's front, with header_sum taken as 0.
uint64_t front_sum(const LosslessKernels& kernels, const uint8_t* message, uint64_t nbytes) {
  constexpr uint64_t kAt = offsetof(Header, header_sum), kBehind = kAt + sizeof(uint64_t);
  WordSums sums;
  sums.add(kernels.sums(message, kAt), 0);
  sums.add(kernels.sums(message + kBehind, nbytes - kBehind), kBehind / 4);
  return sums.sum + (sums.weighted << 20);
}

// --- decode ---

LosslessStatus read_header(const LosslessKernels& kernels, const LosslessDecode& task,
                           Header& header) {
  if (task.message_nbytes < kHeaderNbytes) return LosslessStatus::kTruncated;
  std::memcpy(&header, task.message, kHeaderNbytes);
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic))) return LosslessStatus::kNotAMessage;
  if (header.version != kVersion && header.version != kRankedVersion) {
    return LosslessStatus::kVersion;
  }
  const bool is_coded = header.code == 1 || header.code == 2, is_raw = header.code == 0;
  if (header.type >= (header.version == kVersion ? kLosslessFirstTypes : kLosslessNumTypes) || (!is_coded && !is_raw && header.code != kTooLong) ||
      header.num_dims > kMaxDims || header.reserved) {
    return LosslessStatus::kField;
  }
  // Lengths, before anything is read that they promise.
  if (header.nbytes > header.capacity || header.capacity > task.message_nbytes) {
    return LosslessStatus::kLength;
  }
  const uint64_t itemsize = lossless_itemsize(kLosslessTypes[header.type]);
  uint64_t front = kHeaderNbytes + 8 * uint64_t{header.num_dims};
  if (is_raw) {
    const uint64_t left = header.nbytes - front;
    if (header.nbytes < front || left % itemsize || left / itemsize != header.numel) {
      return LosslessStatus::kLength;
    }
  } else if (is_coded) {
    // No block has more than 8 elements per byte of payload.
    const uint64_t lists = num_blocks_of(header.numel) * kEntryNbytes;  // below 2^55
    if (!header.numel || header.nbytes < front + lists ||
        (header.numel - 1) / 8 >= header.nbytes - front - lists) {
      return LosslessStatus::kLength;
    }
  } else if (header.nbytes != front) {
    return LosslessStatus::kLength;
  }
  uint64_t product = 1, last_size = 0;
  bool is_empty = false;
  for (int d = 0; d < header.num_dims; ++d) {
    uint64_t size;
    std::memcpy(&size, task.message + kHeaderNbytes + 8 * d, 8);
    is_empty |= size == 0;
    last_size = size;
    size = std::max<uint64_t>(size, 1);
    if (size > (~uint64_t{0} >> 1) / product) return LosslessStatus::kField;
    product *= size;
  }
  if (header.numel != (is_empty ? 0 : product)) return LosslessStatus::kField;
  if (is_complex(header.type) && last_size != 2) return LosslessStatus::kField;
  if (is_coded) front += num_blocks_of(header.numel) * kEntryNbytes;
  if (front_sum(kernels, task.message, front) != header.header_sum)
    return LosslessStatus::kHeaderSum;
  if (header.code == kTooLong) return LosslessStatus::kTooLong;
  if (header.numel != task.numel) return LosslessStatus::kMismatch;
  if (task.adds ? header.type >= kLosslessFirstTypes : header.type != task.type) {
    return LosslessStatus::kMismatch;
  }
  return LosslessStatus::kSound;
}

// Checks every entry and the sum of the lengths; sets where each chunk of blocks begins.
bool read_directory(const Header& header, const Blocks& blocks,
                    const Directory<const uint8_t>& directory, uint64_t payload_nbytes,
                    std::vector<uint64_t>& starts) {
  const int kinds = kCodeMask | kZerosLeftOut | (blocks.itemsize == 4 ? 3 * kByteLeftOut : 0);
  const bool has_windows = kLosslessTypes[header.type] < LosslessType::kWord2;
  uint64_t start = 0;
  for (uint64_t b = 0; b < blocks.count(); ++b) {
    if (b % kChunk == 0) starts.push_back(start);
    const LosslessBlock block = directory.get(b);
    start += block.length;
    Tiers tiers;
    if ((block.kind & ~kZerosLeftOut) == kRanked && header.version == kRankedVersion) {
      if (block.base || block.nest) return false;
      continue;
    }
    if (block.kind && !has_windows) return false;
    if (block.kind == 0
            ? block.base || block.nest || block.length != blocks.size(b) * blocks.itemsize
            : block.kind & ~kinds || !read_tiers(block, tiers)) {
      return false;
    }
  }
  return start == payload_nbytes;
}

}  // namespace

uint64_t encode_message(const LosslessKernels& kernels, int64_t num_threads,
                        const LosslessEncode& task) {
  const LosslessType type = kLosslessTypes[task.type];
  const Blocks blocks{task.numel, static_cast<uint64_t>(lossless_itemsize(type))};
  const uint64_t original_nbytes = task.numel * blocks.itemsize;
  const uint64_t shape_end = kHeaderNbytes + 8 * task.num_dims;
  num_threads = useful_threads(task.numel, num_threads);
  Header header = {{kMagic[0], kMagic[1], kMagic[2], kMagic[3]},
                   task.type < kLosslessFirstTypes ? kVersion : kRankedVersion,
                   static_cast<uint8_t>(task.type),
                   static_cast<uint8_t>(task.code),
                   static_cast<uint8_t>(task.num_dims),
                   task.numel,
                   0,
                   0,
                   0,
                   0,
                   0,
                   0};

  // 1. Coded, if that is shorter than the original and fits.
  uint64_t front = shape_end + kEntryNbytes * blocks.count();
  const uint64_t limit = std::min(task.message_nbytes, shape_end + original_nbytes - 1);
  bool is_coded = false;
  WordSums sums;
  if (task.code != LosslessCode::kRaw && task.numel && front < limit) {
    SharedSums shared;
    const Directory<uint8_t> directory{task.message + shape_end, blocks.count()};
    header.nbytes =
        encode_blocks(kernels, num_threads, task, blocks, directory, front, limit, shared);
    sums = shared.get();
    is_coded = header.nbytes <= limit;
    for (uint64_t b = 0; is_coded && b < blocks.count(); ++b) {
      if ((directory.get(b).kind & kCodeMask) == kRanked) header.version = kRankedVersion;
    }
  } else {
    sums = sums_of(kernels, num_threads, task.words, blocks);
  }

  // 2. Raw, or nothing.
  if (!is_coded) {
    front = shape_end;
    const bool fits = original_nbytes <= task.message_nbytes - shape_end;
    header.code = fits ? static_cast<uint8_t>(LosslessCode::kRaw) : kTooLong;
    header.nbytes = shape_end + (fits ? original_nbytes : 0);
    if (fits && original_nbytes) std::memcpy(task.message + shape_end, task.words, original_nbytes);
  }

  // 3. The header, whose own checksum goes in last.
  header.capacity = task.has_capacity ? task.message_nbytes : header.nbytes;
  header.sum = sums.sum;
  header.weighted_sum = sums.weighted;
  std::memcpy(task.message, &header, kHeaderNbytes);
  if (task.num_dims) std::memcpy(task.message + kHeaderNbytes, task.shape, 8 * task.num_dims);
  header.header_sum = front_sum(kernels, task.message, front);
  std::memcpy(task.message, &header, kHeaderNbytes);
  if (task.has_capacity) {
    std::memset(task.message + header.nbytes, 0, task.message_nbytes - header.nbytes);
  }
  return header.nbytes;
}

LosslessStatus decode_message(const LosslessKernels& kernels, int64_t num_threads,
                              const LosslessDecode& task) {
  // 1. Header and lists.
  Header header;
  const LosslessStatus status = read_header(kernels, task, header);
  if (status != LosslessStatus::kSound) return status;
  const LosslessType type = kLosslessTypes[header.type];
  const Blocks blocks{header.numel, static_cast<uint64_t>(lossless_itemsize(type))};
  const uint8_t* const lists = task.message + kHeaderNbytes + 8 * header.num_dims;
  const bool is_raw = header.code == 0;
  const uint8_t* const payload = lists + (is_raw ? 0 : kEntryNbytes * blocks.count());
  const Directory<const uint8_t> directory{lists, blocks.count()};
  std::vector<uint64_t> starts;
  if (!is_raw &&
      !read_directory(header, blocks, directory, task.message + header.nbytes - payload, starts)) {
    return LosslessStatus::kDirectory;
  }

  // 2. Values.
  SharedSums shared;
  std::atomic<bool> is_sound{true};
  num_threads = useful_threads(header.numel, num_threads);
  const auto decode_raw = [&](uint64_t b, WordSums& sums) {
    const uint8_t* const words = payload + blocks.offset_nbytes(b);
    const uint64_t nbytes = blocks.size(b) * blocks.itemsize;
    sums.add(kernels.sums(words, nbytes), blocks.first_word(b));
    if (!task.adds) {
      std::memcpy(task.words + blocks.offset_nbytes(b), words, nbytes);
    } else {
      kernels.add(type, words, blocks.size(b), task.total + b * kLosslessBlock);
    }
  };
  const uint64_t num_chunks = (blocks.count() + kChunk - 1) / kChunk;
  parallel_for(num_chunks, num_threads, [&](int64_t first, int64_t last) {
    WordSums sums;
    const uint8_t* next = is_raw || first == last ? payload : payload + starts[first];
    const uint64_t stop = std::min<uint64_t>(blocks.count(), last * kChunk);
    for (uint64_t b = first * kChunk; b < stop; ++b) {
      if (is_raw) {
        decode_raw(b, sums);
        continue;
      }
      const LosslessBlock block = directory.get(b);
      WordSums own;
      const bool is_ours = task.adds ? kernels.decode_add(type, block, next, blocks.size(b),
                                                          task.total + b * kLosslessBlock, own)
                                     : kernels.decode(type, block, next, blocks.size(b),
                                                      task.words + blocks.offset_nbytes(b), own);
      if (!is_ours) return is_sound.store(false);
      sums.add(own, blocks.first_word(b));
      next += block.length;
    }
    shared.add(sums);
  });
  if (!is_sound) return LosslessStatus::kPayload;

  // 3. What surrounds them.
  const WordSums sums = shared.get();
  if (sums.sum != header.sum || sums.weighted != header.weighted_sum)
    return LosslessStatus::kChecksum;
  uint8_t trailing = 0;
  for (uint64_t i = header.nbytes; i < header.capacity; ++i) trailing |= task.message[i];
  return trailing ? LosslessStatus::kTrailing : LosslessStatus::kSound;
}

}  // namespace laconic
