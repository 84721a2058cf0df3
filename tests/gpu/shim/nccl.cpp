// A stand-in for libnccl.so.2 on the streams of cudart.cpp: the calls of pdserve's binding, for
// communicators of two ranks in two processes of one host.
//
// It holds its caller to NCCL's rules, and refuses what NCCL may punish with a hang: a call while the
// last one is still in progress, an operation outside of a group, host memory, a communicator that
// is gone. Where NCCL waits without end, it does so too, until the communicator is aborted: for a
// peer that died, or that posted another size. Joining, and the work behind ncclGroupEnd, are done
// in the background; the first group also waits for the peer's first.

// nccl.h includes these headers for its device side, and they need yet another package.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int VERSION = 23007;
constexpr int POLL_MS = 2;
constexpr int MAX_CTAS = 64;
constexpr int SENDER = 0;

// A random wait of the background, up to CUDA_SHIM_DELAY_US.
void dawdle() {
  const char *given = getenv("CUDA_SHIM_DELAY_US");
  static thread_local std::minstd_rand dice(std::random_device{}());
  if (given) usleep(std::uniform_int_distribution<unsigned>(0, unsigned(atol(given)))(dice));
}

}  // namespace

// nccl.h leaves this structure to the library.
struct ncclComm {
  std::mutex mutex;
  std::condition_variable changed;
  ncclResult_t state = ncclInProgress;  // of the last call
  bool is_aborted = false;
  bool is_connected = false;
  int rank = 0;
  int fd = -1;
  size_t posted = 0, ended = 0;  // operations

  ~ncclComm() {
    if (fd >= 0) close(fd);
  }
  void finish(ncclResult_t result) {
    std::lock_guard lock(mutex);
    state = result;
  }
  bool aborted() {
    std::lock_guard lock(mutex);
    return is_aborted;
  }
  // Move bytes over the socket. Return false if the communicator was aborted.
  bool transfer(char *bytes, size_t size, bool is_send) {
    while (size && !aborted()) {
      pollfd ready{fd, short(is_send ? POLLOUT : POLLIN), 0};
      if (poll(&ready, 1, POLL_MS) <= 0) continue;
      const auto moved = is_send ? send(fd, bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT)
                                 : recv(fd, bytes, size, MSG_DONTWAIT);
      if (moved > 0) bytes += moved, size -= size_t(moved);
      if (moved == 0 || (moved < 0 && errno != EAGAIN)) usleep(POLL_MS * 1000);  // nobody is there
    }
    return !size;
  }
};

namespace {

using Comm = std::shared_ptr<ncclComm>;

struct Operation {
  Comm comm;
  char *address;
  size_t size;
  size_t number;  // in its communicator

  void run() {
    {
      std::unique_lock lock(comm->mutex);
      comm->changed.wait(lock, [&] { return comm->ended == number || comm->is_aborted; });
    }
    move();
    std::lock_guard lock(comm->mutex);
    ++comm->ended;
    comm->changed.notify_all();
  }

 private:
  void move() {
    const bool is_send = comm->rank == SENDER;
    size_t announced = size;
    auto *head = reinterpret_cast<char *>(&announced);
    if (!comm->transfer(head, sizeof announced, is_send)) return;
    if (announced != size) {
      fprintf(stderr, "NCCL shim: %zu bytes are sent, and %zu received\n", announced, size);
      while (!comm->aborted()) usleep(POLL_MS * 1000);
      return;
    }
    comm->transfer(address, size, is_send);
  }
};

struct Group {
  int depth = 0;
  std::vector<Operation> operations;
  cudaStream_t stream = nullptr;
  ncclResult_t error = ncclSuccess;
};

thread_local Group group;
std::mutex live_mutex;
auto &live = *new std::map<ncclComm_t, Comm>;
std::atomic<const char *> why{"nothing is wrong"};

ncclResult_t fail(ncclResult_t result, const char *text) {
  fprintf(stderr, "NCCL shim: %s\n", text);
  why = text;
  return result;
}

Comm find(ncclComm_t given) {
  std::lock_guard lock(live_mutex);
  auto found = live.find(given);
  return found == live.end() ? nullptr : found->second;
}

void join(const Comm &comm, const std::string &name) {
  dawdle();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path + 1, name.data(), name.size());  // abstract: no file
  const auto length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  auto *plain = reinterpret_cast<sockaddr *>(&address);
  int fd = -1;
  if (comm->rank == SENDER) {
    if (bind(made, plain, length) || listen(made, 1))
      return comm->finish(fail(ncclSystemError, "this id is in use"));
    while (fd < 0 && !comm->aborted()) {
      pollfd ready{made, POLLIN, 0};
      if (poll(&ready, 1, POLL_MS) > 0) fd = accept4(made, nullptr, nullptr, SOCK_CLOEXEC);
    }
    close(made);
  } else {
    while (connect(made, plain, length) && !comm->aborted()) usleep(POLL_MS * 1000);
    fd = made;
  }
  std::lock_guard lock(comm->mutex);
  comm->fd = fd;
  comm->state = ncclSuccess;
}

void call(void *operation) {
  auto *owned = static_cast<Operation *>(operation);
  owned->run();
  delete owned;
}

void post(const Comm &comm, const std::vector<Operation> &operations, cudaStream_t stream) {
  dawdle();
  if (!comm->is_connected) {
    char byte = 0;
    if (!comm->transfer(&byte, 1, true) || !comm->transfer(&byte, 1, false)) return;
    comm->is_connected = true;
  }
  for (auto &each : operations) cudaLaunchHostFunc(stream, call, new Operation(each));
  comm->finish(ncclSuccess);
}

ncclResult_t add(void *address, size_t size, ncclDataType_t type, int peer, ncclComm_t given,
                 cudaStream_t stream, bool is_send) {
  const auto refuse = [](ncclResult_t result, const char *text) {
    return group.error = fail(result, text);
  };
  const auto comm = find(given);
  if (!comm) return refuse(ncclInvalidArgument, "the communicator is gone");
  if (!group.depth) return refuse(ncclInvalidUsage, "an operation outside of a group");
  if (type != ncclUint8 || peer != 1 - comm->rank || !size)
    return refuse(ncclInvalidArgument, "only bytes, and those to or from the peer");
  if (is_send != (comm->rank == SENDER)) return refuse(ncclInvalidUsage, "rank 0 sends");
  cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, address);
  if (attributes.type != cudaMemoryTypeDevice)
    return refuse(ncclInvalidArgument, "the memory is not a GPU's");
  auto &found = group.operations;
  if (!found.empty() && (found[0].comm != comm || group.stream != stream))
    return refuse(ncclInvalidUsage, "a group of several communicators or streams");
  group.stream = stream;
  found.push_back({comm, static_cast<char *>(address), size, 0});
  return ncclSuccess;
}

}  // namespace

ncclResult_t ncclGetVersion(int *version) {
  *version = VERSION;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *made) {
  memset(made, 0, sizeof *made);
  std::random_device dice;
  snprintf(made->internal, sizeof made->internal, "cuda-shim-nccl-%08x%08x", dice(), dice());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
  if (config->magic != NCCL_API_MAGIC || config->size < offsetof(ncclConfig_t, splitShare))
    return fail(ncclInvalidArgument, "the configuration is not ncclConfig_t");
  if (config->blocking != 0 || ranks != 2 || rank < 0 || rank > 1)
    return fail(ncclInvalidArgument, "only two ranks, and calls that do not block");
  if (config->maxCTAs < 1 || config->maxCTAs > MAX_CTAS)
    return fail(ncclInvalidArgument, "maxCTAs is out of range");
  auto comm = std::make_shared<ncclComm>();
  comm->rank = rank;
  *made = comm.get();
  std::lock_guard lock(live_mutex);
  live[comm.get()] = comm;
  std::thread(join, comm, std::string(id.internal)).detach();
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t given, ncclResult_t *state) {
  const auto comm = find(given);
  if (!comm) return fail(ncclInvalidArgument, "the communicator is gone");
  std::lock_guard lock(comm->mutex);
  *state = comm->state;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  if (!group.depth++) group = {1, {}, nullptr, ncclSuccess};
  return ncclSuccess;
}

ncclResult_t ncclSend(const void *address, size_t size, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return add(const_cast<void *>(address), size, type, peer, comm, stream, true);
}

ncclResult_t ncclRecv(void *address, size_t size, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return add(address, size, type, peer, comm, stream, false);
}

ncclResult_t ncclGroupEnd() {
  if (!group.depth) return fail(ncclInvalidUsage, "no group has begun");
  if (--group.depth) return ncclSuccess;
  const auto ended = std::move(group);
  group = {};
  if (ended.error || ended.operations.empty()) return ended.error;
  auto operations = ended.operations;
  const auto comm = operations[0].comm;
  {
    std::lock_guard lock(comm->mutex);
    if (comm->state != ncclSuccess) {
      comm->state = ncclInvalidUsage;
      return fail(ncclInvalidUsage, "the last call on the communicator is still in progress");
    }
    comm->state = ncclInProgress;
    for (auto &each : operations) each.number = comm->posted++;
  }
  std::thread(post, comm, operations, ended.stream).detach();
  return ncclInProgress;
}

ncclResult_t ncclCommAbort(ncclComm_t given) {
  const auto comm = find(given);
  if (!comm) return fail(ncclInvalidArgument, "the communicator is gone");
  {
    std::lock_guard lock(live_mutex);
    live.erase(given);
  }
  std::lock_guard lock(comm->mutex);
  comm->is_aborted = true;
  comm->changed.notify_all();
  return ncclSuccess;
}

const char *ncclGetLastError(ncclComm_t) { return why; }
