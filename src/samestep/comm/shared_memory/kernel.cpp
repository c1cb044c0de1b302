// Collectives of processes that share a region of memory. Plain C interface, loaded by compiled.py through ctypes.
//
// The region holds one seat for each rank (its progress) and two slots for each rank (its message, in chunks):
//
//   [ header | seat 0 .. seat n-1 | slot 0.0, slot 0.1 | slot 1.0, slot 1.1 | ... ]
//
// Progress is counted in phases. A rank that has done its part of a phase adds one to its own counter, and waits until
// the counters of all others have come as far. Chunk k of a message lies in slot k % 2: when a rank has seen all others
// in phase p + 1, they have read what it wrote for phase p, so two slots make one wait a chunk enough.
//
// Numbers are summed in the order of the ranks, whoever sums and however late a rank is: every rank has the same bits.
// fp16 and bf16 are summed in float32 and rounded once.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <type_traits>

#include <fcntl.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kLine = 128;          // bytes that never share a cache line with others
constexpr size_t kBlock = 2048;        // numbers that are summed at a time: their sums stay in the first-level cache
constexpr size_t kPage = 4096;

enum Result { kDone = 0, kTimedOut = 1, kPeerLost = 2, kMismatch = 3, kBroken = 4 };
enum Kind { kBarrier = 0, kAllReduce = 1, kReduceScatter = 2, kAllGather = 3, kBroadcast = 4, kReduce = 5 };
enum Type { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 3, kInt32 = 4, kInt64 = 5, kUInt8 = 6, kInt8 = 7 };
enum Op { kSum = 0, kAverage = 1, kMin = 2, kMax = 3, kProduct = 4 };

struct alignas(kLine) Header {
  std::atomic<uint32_t> broken;  // a rank has given up: the others need not wait
};

struct alignas(kLine) Seat {
  std::atomic<uint32_t> phase;
  std::atomic<uint32_t> waiting;   // how many sleep until the phase changes
  std::atomic<uint64_t> signature[2];  // of the collective that began in an even, an odd phase
  std::atomic<int32_t> processor;      // that the rank ran on when it last arrived; -1: not known
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "counters between processes need lock-free atomics");

struct Group {
  char* base;
  int file;
  int rank;
  int size;
  int spins;         // looks at a counter before the processor is given away
  bool roomy;        // whether every rank may have a processor of its own
  size_t slot;       // bytes: how much of a message ranks work on at a time
  int64_t limit_ns;  // of one wait
  uint32_t phase;
  uint32_t chunk;    // parity: which of its two slots a rank writes next
  int lost;          // the rank that a failed wait was for

  Header* header() const { return reinterpret_cast<Header*>(base); }
  Seat* seat(int r) const { return reinterpret_cast<Seat*>(base + sizeof(Header)) + r; }
  char* slot_of(int r, uint32_t parity) const {
    size_t first = (sizeof(Header) + sizeof(Seat) * size + kPage - 1) / kPage * kPage;
    return base + first + (size_t(r) * 2 + parity) * slot;
  }
};

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int32_t this_processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Sleeps until a counter changes, at most for some milliseconds.
void sleep_on(std::atomic<uint32_t>& counter, uint32_t seen) {
#if defined(__linux__)
  timespec limit{0, 20 * 1000 * 1000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&counter), FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  (void)counter;
  (void)seen;
  std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake(std::atomic<uint32_t>& counter) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&counter), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
  (void)counter;
#endif
}

// Whether a rank's process lives: it holds a lock on its byte of the file, which the kernel takes back at its end.
bool lives(const Group& group, int rank) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  if (fcntl(group.file, F_GETLK, &lock) != 0) return true;  // not known
  return lock.l_type != F_UNLCK;
}

void arrive(Group& group) {
  Seat* own = group.seat(group.rank);
  own->processor.store(this_processor(), std::memory_order_relaxed);
  own->phase.store(++group.phase, std::memory_order_seq_cst);
  if (own->waiting.load(std::memory_order_seq_cst) != 0) wake(own->phase);
}

inline bool has_come(uint32_t phase, uint32_t wanted) { return int32_t(phase - wanted) >= 0; }

Result wait_for(Group& group, int rank) {
  Seat* seat = group.seat(rank);
  // A rank that was last on this processor can't run while this one looks. Where there are enough of them, sleep: the
  // system places a thread that is woken on an idle processor, but leaves two that spin or yield together for long.
  int32_t theirs = seat->processor.load(std::memory_order_relaxed);
  bool together = theirs >= 0 && theirs == this_processor();
  int spins = together ? 0 : group.spins, yields = together && group.roomy ? 0 : 64;
  for (int i = 0; i < spins; i++) {
    if (has_come(seat->phase.load(std::memory_order_acquire), group.phase)) return kDone;
    pause();
  }
  for (int i = 0; i < yields; i++) {  // the other one may want this very processor
    std::this_thread::yield();
    if (has_come(seat->phase.load(std::memory_order_acquire), group.phase)) return kDone;
  }
  auto began = Clock::now();
  while (true) {
    uint32_t seen = seat->phase.load(std::memory_order_seq_cst);
    if (has_come(seen, group.phase)) return kDone;
    if (group.header()->broken.load(std::memory_order_acquire)) return kBroken;
    seat->waiting.fetch_add(1, std::memory_order_seq_cst);
    seen = seat->phase.load(std::memory_order_seq_cst);
    if (!has_come(seen, group.phase)) sleep_on(seat->phase, seen);
    seat->waiting.fetch_sub(1, std::memory_order_seq_cst);
    if (has_come(seat->phase.load(std::memory_order_acquire), group.phase)) return kDone;
    auto waited = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began).count();
    // It may have come and ended since the last look.
    if (!lives(group, rank) && !has_come(seat->phase.load(std::memory_order_seq_cst), group.phase)) {
      group.lost = rank;
      return kPeerLost;
    }
    if (waited > group.limit_ns) {
      group.lost = rank;
      return kTimedOut;
    }
  }
}

Result wait_all(Group& group) {
  for (int i = 1; i < group.size; i++) {
    Result result = wait_for(group, (group.rank + i) % group.size);
    if (result != kDone) return result;
  }
  return kDone;
}

Result meet(Group& group) {
  arrive(group);
  return wait_all(group);
}

uint64_t signature_of(Kind kind, uint64_t bytes, int type, int op, int root) {
  return bytes << 16 | uint64_t(kind) << 12 | uint64_t(type) << 8 | uint64_t(op) << 4 | (uint64_t(root) & 15);
}

// The first wait of a collective. All ranks must have called the same one, of as many bytes.
Result begin(Group& group, uint64_t signature) {
  uint32_t parity = (group.phase + 1) & 1;
  group.seat(group.rank)->signature[parity].store(signature, std::memory_order_relaxed);
  Result result = meet(group);
  if (result != kDone) return result;
  for (int r = 0; r < group.size; r++) {
    if (group.seat(r)->signature[parity].load(std::memory_order_relaxed) != signature) {
      group.lost = r;
      return kMismatch;
    }
  }
  return kDone;
}

// -- numbers ------------------------------------------------------------------------------------------------------

struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };

inline float from_bits(uint32_t bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline uint32_t to_bits(float value) { uint32_t bits; std::memcpy(&bits, &value, 4); return bits; }

inline float widen(Brain value) { return from_bits(uint32_t(value.bits) << 16); }
inline void narrow(float value, Brain& out) {
  uint32_t bits = to_bits(value);
  uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);  // to the nearest, halves to even
  out.bits = value != value ? 0x7fc0 : uint16_t(rounded >> 16);
}

#if defined(__FLT16_MAX__)
inline float widen(Half value) { _Float16 half; std::memcpy(&half, &value, 2); return float(half); }
inline void narrow(float value, Half& out) { _Float16 half = _Float16(value); std::memcpy(&out, &half, 2); }
#else
inline float widen(Half value) {
  uint32_t sign = uint32_t(value.bits & 0x8000) << 16, exponent = (value.bits >> 10) & 31, part = value.bits & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000 | part << 13);
  if (exponent != 0) return from_bits(sign | (exponent + 112) << 23 | part << 13);
  float small = float(part) * 5.9604644775390625e-8f;  // 2^-24: below the normal numbers
  return sign ? -small : small;
}
inline void narrow(float value, Half& out) {
  uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) { out.bits = 0x7e00; return; }
  if (rest >= 0x477ff000) { out.bits = uint16_t(sign | 0x7c00); return; }  // 65520 and above round to infinity
  if (rest < 0x38800000) {  // below 2^-14: adding 0.5 leaves the wanted digits last, rounded to even
    out.bits = uint16_t(sign | (to_bits(from_bits(rest) + 0.5f) - 0x3f000000));
    return;
  }
  out.bits = uint16_t(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13));
}
#endif

template <typename T> struct Sums { using type = T; };
template <> struct Sums<Half> { using type = float; };
template <> struct Sums<Brain> { using type = float; };

template <typename T> inline typename Sums<T>::type load(const T& value) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Brain>) return widen(value);
  else return value;
}
template <typename T> inline void store(typename Sums<T>::type value, T& out) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Brain>) narrow(value, out);
  else out = value;
}

template <int op, typename S> inline S joined(S a, S b) {
  if constexpr (op == kMin) return a != a ? a : (b < a || b != b ? b : a);  // NaN stays, as PyTorch has it
  else if constexpr (op == kMax) return a != a ? a : (a < b || b != b ? b : a);
  else if constexpr (op == kProduct) return S(a * b);
  else return S(a + b);
}

// out = in[0] op in[1] op ... in this order, and `copy` likewise where it is given. `out` may be one of the inputs: a
// block is read from all of them before it is written. The sums are an array that nobody else sees, so that the loops
// become vector instructions.
template <typename T, int op>
void reduce(T* out, T* copy, const T* const* in, int n, size_t count) {
  using S = typename Sums<T>::type;
  S sums[kBlock];
  T numbers[kBlock];
  for (size_t first = 0; first < count; first += kBlock) {
    size_t some = std::min(kBlock, count - first);
    const T *a = in[0] + first, *b = in[1] + first;
    for (size_t i = 0; i < some; i++) sums[i] = joined<op, S>(load(a[i]), load(b[i]));
    for (int r = 2; r < n; r++) {
      const T* next = in[r] + first;
      for (size_t i = 0; i < some; i++) sums[i] = joined<op, S>(sums[i], load(next[i]));
    }
    if constexpr (op == kAverage) {
      for (size_t i = 0; i < some; i++) sums[i] = S(sums[i] / S(n));
    }
    const void* found = sums;
    if constexpr (!std::is_same_v<T, S>) {
      for (size_t i = 0; i < some; i++) store<T>(sums[i], numbers[i]);
      found = numbers;
    }
    std::memcpy(out + first, found, some * sizeof(T));
    if (copy) std::memcpy(copy + first, found, some * sizeof(T));
  }
}

using Reduce = void (*)(void*, void*, const void* const*, int, size_t);

template <typename T, int op>
void reduce_untyped(void* out, void* copy, const void* const* in, int n, size_t count) {
  reduce<T, op>(static_cast<T*>(out), static_cast<T*>(copy), reinterpret_cast<const T* const*>(in), n, count);
}

template <typename T> Reduce reduce_of(int op) {
  switch (op) {
    case kSum: return reduce_untyped<T, kSum>;
    case kAverage: return reduce_untyped<T, kAverage>;
    case kMin: return reduce_untyped<T, kMin>;
    case kMax: return reduce_untyped<T, kMax>;
    default: return reduce_untyped<T, kProduct>;
  }
}

Reduce reduce_of(int type, int op) {
  switch (type) {
    case kFloat32: return reduce_of<float>(op);
    case kFloat64: return reduce_of<double>(op);
    case kFloat16: return reduce_of<Half>(op);
    case kBFloat16: return reduce_of<Brain>(op);
    case kInt32: return reduce_of<int32_t>(op);
    case kInt64: return reduce_of<int64_t>(op);
    case kUInt8: return reduce_of<uint8_t>(op);
    default: return reduce_of<int8_t>(op);
  }
}

size_t bytes_of(int type) {
  switch (type) {
    case kFloat64: case kInt64: return 8;
    case kFloat32: case kInt32: return 4;
    case kFloat16: case kBFloat16: return 2;
    default: return 1;
  }
}

constexpr int kMostRanks = 64;

// The first byte of a rank's part of a chunk: whole cache lines, but for the last part's end.
size_t part_of(size_t bytes, int rank, int size) {
  return rank == size ? bytes : bytes * rank / size / kLine * kLine;
}

// -- collectives --------------------------------------------------------------------------------------------------

// Each rank reads every rank's chunk and sums it all: one wait a chunk, (n + 1) passes over the message.
Result all_reduce_directly(Group& group, char* data, size_t bytes, size_t width, Reduce sum, uint64_t signature) {
  const void* in[kMostRanks];
  for (size_t done = 0; done < bytes; done += group.slot) {
    size_t some = std::min(group.slot, bytes - done);
    uint32_t parity = group.chunk++ & 1;
    std::memcpy(group.slot_of(group.rank, parity), data + done, some);
    Result result = done == 0 ? begin(group, signature) : meet(group);
    if (result != kDone) return result;
    for (int r = 0; r < group.size; r++) in[r] = r == group.rank ? data + done : group.slot_of(r, parity);
    sum(data + done, nullptr, in, group.size, some / width);
  }
  return kDone;
}

// Puts what others sum of a chunk where they find it: all but this rank's own part.
void give(const Group& group, uint32_t parity, const char* data, size_t bytes) {
  size_t first = part_of(bytes, group.rank, group.size), end = part_of(bytes, group.rank + 1, group.size);
  char* slot = group.slot_of(group.rank, parity);
  std::memcpy(slot, data, first);
  std::memcpy(slot + end, data + end, bytes - end);
}

// Reduce-scatter, then all-gather, chunk by chunk: two waits a chunk. Each rank sums one part of n, and copies the
// others' parts in and out: 2 (n - 1) / n copies of the message.
Result all_reduce_in_parts(Group& group, char* data, size_t bytes, size_t width, Reduce sum, uint64_t signature) {
  const void* in[kMostRanks];
  size_t some = std::min(group.slot, bytes);
  uint32_t parity = group.chunk++ & 1;
  give(group, parity, data, some);
  for (size_t done = 0; done < bytes;) {
    Result result = done == 0 ? begin(group, signature) : meet(group);
    if (result != kDone) return result;
    size_t first = part_of(some, group.rank, group.size), end = part_of(some, group.rank + 1, group.size);
    char* own = data + done + first;
    for (int r = 0; r < group.size; r++) in[r] = r == group.rank ? own : group.slot_of(r, parity) + first;
    sum(own, group.slot_of(group.rank, parity) + first, in, group.size, (end - first) / width);
    arrive(group);
    size_t next = done + some, following = next < bytes ? std::min(group.slot, bytes - next) : 0;
    uint32_t other = parity ^ 1;
    if (following) {  // while the others still sum
      group.chunk++;
      give(group, other, data + next, following);
    }
    for (int i = 1; i < group.size; i++) {
      int r = (group.rank + i) % group.size;
      result = wait_for(group, r);
      if (result != kDone) return result;
      size_t from = part_of(some, r, group.size), to = part_of(some, r + 1, group.size);
      std::memcpy(data + done + from, group.slot_of(r, parity) + from, to - from);
    }
    done = next;
    some = following;
    parity = other;
  }
  return kDone;
}

// `in`: n parts of `bytes`; each rank sums one of them.
Result reduce_scatter(Group& group, const char* in_data, char* out, size_t bytes, size_t width, Reduce sum,
                      uint64_t signature) {
  const void* in[kMostRanks];
  size_t room = group.slot / group.size / kLine * kLine;  // of a slot, for each part
  for (size_t done = 0; done < bytes; done += room) {
    size_t some = std::min(room, bytes - done);
    uint32_t parity = group.chunk++ & 1;
    const char* own = in_data + group.rank * bytes + done;
    for (int r = 0; r < group.size; r++) {
      if (r == group.rank) continue;
      std::memcpy(group.slot_of(group.rank, parity) + r * room, in_data + r * bytes + done, some);
    }
    Result result = done == 0 ? begin(group, signature) : meet(group);
    if (result != kDone) return result;
    for (int r = 0; r < group.size; r++) {
      in[r] = r == group.rank ? own : group.slot_of(r, parity) + group.rank * room;
    }
    sum(out + done, nullptr, in, group.size, some / width);
  }
  return kDone;
}

// The others write, the root sums into its own message: one copy on each, one wait a chunk.
Result reduce_to(Group& group, char* data, size_t bytes, size_t width, Reduce sum, int root, uint64_t signature) {
  const void* in[kMostRanks];
  for (size_t done = 0; done < bytes; done += group.slot) {
    size_t some = std::min(group.slot, bytes - done);
    uint32_t parity = group.chunk++ & 1;
    if (group.rank != root) std::memcpy(group.slot_of(group.rank, parity), data + done, some);
    Result result = done == 0 ? begin(group, signature) : meet(group);
    if (result != kDone) return result;
    if (group.rank != root) continue;
    for (int r = 0; r < group.size; r++) in[r] = r == root ? data + done : group.slot_of(r, parity);
    sum(data + done, nullptr, in, group.size, some / width);
  }
  return kDone;
}

// `out`: n parts of `bytes`, in the order of the ranks. A broadcast: one part, from its root.
Result gather(Group& group, const char* in, char* out, size_t bytes, int root, uint64_t signature) {
  for (size_t done = 0; done < bytes; done += group.slot) {
    size_t some = std::min(group.slot, bytes - done);
    uint32_t parity = group.chunk++ & 1;
    bool gives = root < 0 || root == group.rank;
    if (gives) std::memcpy(group.slot_of(group.rank, parity), in + done, some);
    Result result = done == 0 ? begin(group, signature) : meet(group);
    if (result != kDone) return result;
    if (root >= 0) {
      if (!gives) std::memcpy(out + done, group.slot_of(root, parity), some);
      continue;
    }
    for (int r = 0; r < group.size; r++) {
      const char* from = r == group.rank ? in + done : group.slot_of(r, parity);
      char* to = out + r * bytes + done;
      if (from != to) std::memcpy(to, from, some);
    }
  }
  return kDone;
}

int ended(Group& group, Result result) {
  if (result != kDone) {  // the others' waits end, too
    group.header()->broken.store(1, std::memory_order_seq_cst);
    for (int r = 0; r < group.size; r++) wake(group.seat(r)->phase);
  }
  return result;
}

}  // namespace

extern "C" {

size_t samestep_region_bytes(int size, size_t slot) {
  size_t first = (sizeof(Header) + sizeof(Seat) * size + kPage - 1) / kPage * kPage;
  return first + size_t(size) * 2 * slot;
}

int samestep_most_ranks() { return kMostRanks; }

void* samestep_open(
    void* base, int file, int rank, int size, size_t slot, int64_t limit_ns, int spins, int roomy) {
  return new (std::nothrow) Group{
      static_cast<char*>(base), file, rank, size, spins, roomy != 0, slot, limit_ns, 0, 0, -1};
}

void samestep_close(void* handle) { delete static_cast<Group*>(handle); }

void samestep_break(void* handle) { ended(*static_cast<Group*>(handle), kBroken); }

int samestep_lost(void* handle) { return static_cast<Group*>(handle)->lost; }

int samestep_barrier(void* handle) {
  Group& group = *static_cast<Group*>(handle);
  return ended(group, begin(group, signature_of(kBarrier, 0, 0, 0, 0)));
}

int samestep_all_reduce(void* handle, void* data, size_t count, int type, int op, size_t directly_below) {
  Group& group = *static_cast<Group*>(handle);
  size_t width = bytes_of(type), bytes = count * width;
  Reduce sum = reduce_of(type, op);
  uint64_t signature = signature_of(kAllReduce, bytes, type, op, 0);
  bool directly = bytes < directly_below;
  char* from = static_cast<char*>(data);
  return ended(group, directly ? all_reduce_directly(group, from, bytes, width, sum, signature)
                               : all_reduce_in_parts(group, from, bytes, width, sum, signature));
}

int samestep_reduce_scatter(void* handle, const void* in, void* out, size_t count, int type, int op) {
  Group& group = *static_cast<Group*>(handle);
  size_t width = bytes_of(type), bytes = count * width;
  return ended(group, reduce_scatter(group, static_cast<const char*>(in), static_cast<char*>(out), bytes, width,
                                     reduce_of(type, op), signature_of(kReduceScatter, bytes, type, op, 0)));
}

int samestep_reduce(void* handle, void* data, size_t count, int type, int op, int root) {
  Group& group = *static_cast<Group*>(handle);
  size_t width = bytes_of(type), bytes = count * width;
  return ended(group, reduce_to(group, static_cast<char*>(data), bytes, width, reduce_of(type, op), root,
                                signature_of(kReduce, bytes, type, op, root)));
}

int samestep_all_gather(void* handle, const void* in, void* out, size_t bytes) {
  Group& group = *static_cast<Group*>(handle);
  return ended(group, gather(group, static_cast<const char*>(in), static_cast<char*>(out), bytes, -1,
                             signature_of(kAllGather, bytes, 0, 0, 0)));
}

int samestep_broadcast(void* handle, void* data, size_t bytes, int root) {
  Group& group = *static_cast<Group*>(handle);
  return ended(group, gather(group, static_cast<const char*>(data), static_cast<char*>(data), bytes, root,
                             signature_of(kBroadcast, bytes, 0, 0, root)));
}

}  // extern "C"
