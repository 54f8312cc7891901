#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace laconic {
namespace {

// Parts per thread: enough that threads which start at different times end together.
constexpr int64_t kPartsPerThread = 4;
// How long an idle thread looks for more work before it sleeps; waking it takes about as long.
constexpr std::chrono::microseconds kPatience{50};

class DefaultFloatingPointMode {
#if defined(__SSE2__)
 public:
  DefaultFloatingPointMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultFloatingPointMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
 public:
  DefaultFloatingPointMode() {}
#endif
};

void pause() {
#if defined(__SSE2__)
  _mm_pause();
#endif
}

// One call of parallel_for. Whoever holds it may outlive the call, but then finds no part left and
// never touches `work` again.
struct Task {
  const std::function<void(int64_t, int64_t)>* work;
  int64_t count, num_parts;
  std::atomic<int64_t> seats;  // threads that may still join
  std::atomic<int64_t> next{0}, done{0};

  void help() {
    const DefaultFloatingPointMode mode;
    for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < num_parts;) {
      (*work)(count* part / num_parts, count * (part + 1) / num_parts);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

class Pool {
 public:
  void run(const std::shared_ptr<Task>& task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      grow(task->seats.load(std::memory_order_relaxed));
      task_ = task;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    task->help();
    while (task->done.load(std::memory_order_acquire) < task->num_parts) std::this_thread::yield();
  }

 private:
  void grow(int64_t wanted) {
    try {
      for (; num_threads_ < wanted; ++num_threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // The system has no thread left to give; calling threads do what is not taken.
    }
  }

  void serve() {
    uint64_t seen = 0;
    for (;;) {
      const auto give_up = std::chrono::steady_clock::now() + kPatience;
      while (generation_.load(std::memory_order_acquire) == seen &&
             std::chrono::steady_clock::now() < give_up) {
        pause();
      }
      std::shared_ptr<Task> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
        seen = generation_.load(std::memory_order_relaxed);
        task = task_;
      }
      if (task->seats.fetch_sub(1, std::memory_order_relaxed) > 0) task->help();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<Task> task_;           // the newest, under mutex_
  std::atomic<uint64_t> generation_{0};  // counts tasks; written under mutex_
  int64_t num_threads_ = 0;
};

// Never destroyed, because its threads run until the process ends. A forked child has none of them
// and starts with a new pool.
Pool* pool = new Pool;
bool is_forked = false;

#if defined(__unix__) || defined(__APPLE__)
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
  pool = new Pool;
  is_forked = true;
});
#endif

// The threads on which torch computes: those of its OpenMP runtime, asked by names that GCC's and
// LLVM's both have.
struct Team {
  void (*run)(void (*)(void*), void*, unsigned num_threads, unsigned flags) = nullptr;
  int (*size)() = nullptr;

  Team() {
#if defined(__linux__)
    run = reinterpret_cast<decltype(run)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    size = reinterpret_cast<decltype(size)>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
#endif
  }

  // Threads of torch look for more work for milliseconds after each of its operations. A pool beside
  // them would wait for their cores, and they for the pool's: with two threads on two cores our
  // kernels took as long as with one. Each thread that asks a runtime has a team of its own, so all
  // but the main thread, in which a training step computes, share the pool. No team outlives fork.
  bool is_for_caller() const {
#if defined(__linux__)
    return run != nullptr && size != nullptr && !is_forked && getpid() == syscall(SYS_gettid);
#else
    return false;
#endif
  }
};

}  // namespace

void parallel_for(int64_t count, int64_t num_threads,
                  const std::function<void(int64_t, int64_t)>& work) {
  if (num_threads <= 1) {
    const DefaultFloatingPointMode mode;
    return work(0, count);
  }
  const auto task = std::make_shared<Task>();
  task->work = &work;
  task->count = count;
  task->num_parts = std::min(count, num_threads * kPartsPerThread);
  static const Team team;
  if (team.is_for_caller()) {
    // A runtime ends the threads that a smaller team has no place for, so the whole one starts.
    task->seats = num_threads;
    const auto help = [](void* own) {
      Task& task = *static_cast<Task*>(own);
      if (task.seats.fetch_sub(1, std::memory_order_relaxed) > 0) task.help();
    };
    const int64_t size = std::max<int64_t>(num_threads, team.size());
    return team.run(help, task.get(), static_cast<unsigned>(size), 0);
  }
  task->seats = num_threads - 1;
  pool->run(task);
}

}  // namespace laconic
