// Collectives between processes of one host: a slot of shared memory per rank and a counting barrier.
// A peer that does not come within the time limit breaks the stream, so that the next wait fails.
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "sim.h"

namespace sim {
namespace {

constexpr size_t kSlot = 1 << 20;
constexpr int kRanks = 16;
constexpr int kJoinTries = 3000, kJoinPauseUs = 10000;

struct Board {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int arrived;
  long round;
  alignas(64) char slot[kRanks][kSlot];
  volatile char is_ready;
};

struct Comm {
  Board* board;
  size_t ranks, rank;
  std::string name;

  bool barrier() {
    timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    long wait_ms = panel().ccl_timeout_ms;
    until.tv_sec += wait_ms / 1000;
    until.tv_nsec += wait_ms % 1000 * 1000000;
    if (until.tv_nsec >= 1000000000) {
      ++until.tv_sec;
      until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&board->lock);
    long round = board->round;
    bool in_time = true;
    if (++board->arrived == (int)ranks) {
      board->arrived = 0;
      ++board->round;
      pthread_cond_broadcast(&board->changed);
    } else {
      while (board->round == round && in_time)
        in_time = pthread_cond_timedwait(&board->changed, &board->lock, &until) != ETIMEDOUT;
    }
    pthread_mutex_unlock(&board->lock);
    return in_time;
  }
};

size_t width(C_DataType type) {
  switch (type) {
    case BOOL: case UINT8: case INT8: return 1;
    case UINT16: case INT16: case FLOAT16: case BFLOAT16: return 2;
    case UINT32: case INT32: case FLOAT32: return 4;
    default: return 8;
  }
}

// bfloat16 bits as a float and back, rounded to nearest even.
struct Bfloat16 {
  uint16_t bits;
  Bfloat16() = default;
  explicit Bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
};

template <typename Wide>
Wide combine(Wide a, Wide b, C_CCLReduceOp op) {
  return op == MAX ? std::max(a, b) : op == MIN ? std::min(a, b) : op == PRODUCT ? a * b : a + b;
}

// In rank order whoever reduces, so that every rank gets the same bits.
template <typename T, typename Wide>
void fold(Comm* comm, void* out, size_t skip, size_t count, C_CCLReduceOp op) {
  for (size_t i = 0; i < count; ++i) {
    Wide value = ((T*)comm->board->slot[0])[skip + i];
    for (size_t r = 1; r < comm->ranks; ++r)
      value = combine<Wide>(value, ((T*)comm->board->slot[r])[skip + i], op);
    ((T*)out)[i] = T(op == AVG ? value / (Wide)comm->ranks : value);
  }
}

void fold_any(Comm* comm, void* out, size_t skip, size_t count, C_DataType type, C_CCLReduceOp op) {
  switch (type) {
    case FLOAT32: return fold<float, float>(comm, out, skip, count, op);
    case FLOAT64: return fold<double, double>(comm, out, skip, count, op);
    case INT32: return fold<int32_t, int32_t>(comm, out, skip, count, op);
    case INT64: return fold<int64_t, int64_t>(comm, out, skip, count, op);
    case UINT8: return fold<uint8_t, int>(comm, out, skip, count, op);
    case FLOAT16: return fold<_Float16, float>(comm, out, skip, count, op);
    case BFLOAT16: return fold<Bfloat16, float>(comm, out, skip, count, op);
    default: fprintf(stderr, "[sim] collective of data type %d is not implemented\n", type);
  }
}

using Step = std::function<void(Board*, size_t, size_t)>;

// Slot-sized pieces: put(piece) before the barrier, get(piece) after it.
C_Status exchange(C_CCLComm handle, C_Stream stream, size_t bytes, size_t piece_bytes, Step put, Step get) {
  ++panel().ccl_calls;
  if (panel().lost) return C_INTERNAL_ERROR;
  auto* comm = (Comm*)handle;
  queue_task(stream, "collective", [=] {
    for (size_t at = 0; at < bytes; at += piece_bytes) {
      size_t size = std::min(piece_bytes, bytes - at);
      put(comm->board, at, size);
      if (!comm->barrier()) return break_stream(stream);
      get(comm->board, at, size);
      if (!comm->barrier()) return break_stream(stream);
    }
  });
  return C_SUCCESS;
}

Step put_own(Comm* comm, const char* data) {
  return [=](Board* board, size_t at, size_t size) { memcpy(board->slot[comm->rank], data + at, size); };
}

C_Status comm_name(C_CCLComm comm, char* name) {
  strcpy(name, ((Comm*)comm)->name.c_str());
  return C_SUCCESS;
}
C_Status id_size(size_t* size) {
  *size = 64;
  return C_SUCCESS;
}
C_Status unique_id(C_CCLRootId* id) {
  static std::atomic<int> next{0};
  snprintf((char*)id->data, 64, "/sim_ccl_%s_%d_%d", device_type().c_str(), (int)getpid(), next++);
  return C_SUCCESS;
}

Board* open_board(const char* name, bool is_first) {
  int file = -1;
  if (is_first) {
    file = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(Board))) return nullptr;
  } else {
    struct stat info = {};
    for (int i = 0; i < kJoinTries && info.st_size < (off_t)sizeof(Board); ++i) {
      if (file < 0) file = shm_open(name, O_RDWR, 0600);
      if (file >= 0) fstat(file, &info);
      if (info.st_size < (off_t)sizeof(Board)) usleep(kJoinPauseUs);
    }
    if (file < 0) return nullptr;
  }
  void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return memory == MAP_FAILED ? nullptr : (Board*)memory;
}

void prepare_board(Board* board) {
  pthread_mutexattr_t mutex_attr;
  pthread_mutexattr_init(&mutex_attr);
  pthread_mutexattr_setpshared(&mutex_attr, PTHREAD_PROCESS_SHARED);
  pthread_mutex_init(&board->lock, &mutex_attr);
  pthread_condattr_t cond_attr;
  pthread_condattr_init(&cond_attr);
  pthread_condattr_setpshared(&cond_attr, PTHREAD_PROCESS_SHARED);
  pthread_cond_init(&board->changed, &cond_attr);
  __sync_synchronize();
  board->is_ready = 1;
}

C_Status comm_init(size_t ranks, C_CCLRootId* id, size_t rank, C_CCLComm* out) {
  if (ranks > kRanks) return C_ERROR;
  const char* name = (const char*)id->data;
  Board* board = open_board(name, rank == 0);
  if (!board) return C_FAILED;
  if (rank == 0) prepare_board(board);
  for (int i = 0; i < kJoinTries && !board->is_ready; ++i) usleep(kJoinPauseUs);
  auto* comm = new Comm{board, ranks, rank, name};
  if (!comm->barrier()) return C_FAILED;
  if (rank == 0) shm_unlink(name);
  *out = (C_CCLComm)comm;
  return C_SUCCESS;
}
C_Status comm_destroy(C_CCLComm handle) {
  auto* comm = (Comm*)handle;
  munmap(comm->board, sizeof(Board));
  delete comm;
  return C_SUCCESS;
}

C_Status all_reduce(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm handle,
                    C_Stream stream) {
  auto* comm = (Comm*)handle;
  char* out = (char*)host(to);
  return exchange(handle, stream, count * width(type), kSlot, put_own(comm, (char*)host(from)),
                  [=](Board*, size_t at, size_t size) { fold_any(comm, out + at, 0, size / width(type), type, op); });
}
C_Status reduce(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, size_t root,
                C_CCLComm handle, C_Stream stream) {
  auto* comm = (Comm*)handle;
  char* out = (char*)host(to);
  return exchange(handle, stream, count * width(type), kSlot, put_own(comm, (char*)host(from)),
                  [=](Board*, size_t at, size_t size) {
                    if (comm->rank == root) fold_any(comm, out + at, 0, size / width(type), type, op);
                  });
}
C_Status broadcast(void* buffer, size_t count, C_DataType type, size_t root, C_CCLComm handle, C_Stream stream) {
  auto* comm = (Comm*)handle;
  char* data = (char*)host(buffer);
  return exchange(
      handle, stream, count * width(type), kSlot,
      [=](Board* board, size_t at, size_t size) {
        if (comm->rank == root) memcpy(board->slot[root], data + at, size);
      },
      [=](Board* board, size_t at, size_t size) {
        if (comm->rank != root) memcpy(data + at, board->slot[root], size);
      });
}
C_Status all_gather(void* from, void* to, size_t count, C_DataType type, C_CCLComm handle, C_Stream stream) {
  auto* comm = (Comm*)handle;
  char* out = (char*)host(to);
  size_t whole = count * width(type);
  return exchange(handle, stream, whole, kSlot, put_own(comm, (char*)host(from)),
                  [=](Board* board, size_t at, size_t size) {
                    for (size_t r = 0; r < comm->ranks; ++r) memcpy(out + r * whole + at, board->slot[r], size);
                  });
}
C_Status reduce_scatter(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm handle,
                        C_Stream stream) {
  auto* comm = (Comm*)handle;
  const char* in = (char*)host(from);
  char* out = (char*)host(to);
  size_t own = count * width(type), ranks = comm->ranks;
  size_t piece = kSlot / ranks / 64 * 64;  // of each rank's share, so that all shares fit into a slot
  return exchange(
      handle, stream, own, piece,
      [=](Board* board, size_t at, size_t size) {
        for (size_t r = 0; r < ranks; ++r) memcpy(board->slot[comm->rank] + r * size, in + r * own + at, size);
      },
      [=](Board*, size_t at, size_t size) {
        size_t number = size / width(type);
        fold_any(comm, out + at, comm->rank * number, number, type, op);
      });
}
C_Status group() { return C_SUCCESS; }

}  // namespace

void fill_collective_table(C_DeviceInterface* table) {
  table->xccl_get_comm_name = comm_name;
  table->xccl_get_unique_id_size = id_size;
  table->xccl_get_unique_id = unique_id;
  table->xccl_comm_init_rank = comm_init;
  table->xccl_destroy_comm = comm_destroy;
  table->xccl_all_reduce = all_reduce;
  table->xccl_reduce = reduce;
  table->xccl_broadcast = broadcast;
  table->xccl_all_gather = all_gather;
  table->xccl_reduce_scatter = reduce_scatter;
  table->xccl_group_start = group;
  table->xccl_group_end = group;
}

}  // namespace sim
