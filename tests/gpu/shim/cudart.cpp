// A stand-in for libcudart.so.13, which lets torch's CUDA build run where there is no GPU.
//
// Device memory is shared memory of the host, a stream is a thread, and an IPC handle names a file
// descriptor of the process that exports it. What CUDA leaves undefined is made to fail here: new
// memory holds garbage, the copies of a batch run in any order, and pageable memory is read before a
// call returns while pinned memory is read when the stream comes to it.
//
// Kernels cannot run: a launch is refused by name. kernels.py replaces those that the tests need.
//
// CUDA_SHIM_DELAY_US: each operation of a stream waits up to so many microseconds before it runs.
// CUDA_SHIM_KERNELS=skip: a launch does nothing instead, so what a kernel would write stays as it is.

#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Work = std::function<void()>;

constexpr int VERSION = 13000;
constexpr size_t TOTAL_BYTES = size_t(8) << 30;
constexpr int GARBAGE = 0xA5;
constexpr int HIGHEST_PRIORITY = -5;

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error, const char *why) {
  fprintf(stderr, "CUDA shim: %s\n", why);
  return last_error = error;
}

// The longest delay of an operation, in microseconds.
unsigned max_delay_us() {
  static const char *given = getenv("CUDA_SHIM_DELAY_US");
  static const unsigned value = given ? unsigned(atol(given)) : 0;
  return value;
}

bool skips_kernels() {
  static const char *given = getenv("CUDA_SHIM_KERNELS");
  return given && !strcmp(given, "skip");
}

// A point in a stream that has been recorded once.
class Mark {
 public:
  void reach() {
    std::lock_guard lock(mutex_);
    reached_at_ = Clock::now();
    is_reached_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_reached_; });
  }
  bool is_reached() {
    std::lock_guard lock(mutex_);
    return is_reached_;
  }
  Clock::time_point reached_at() {
    std::lock_guard lock(mutex_);
    return reached_at_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_reached_ = false;
  Clock::time_point reached_at_;
};

}  // namespace

// CUDA declares these two structures, and leaves what is in them to the library.
struct CUevent_st {
  std::mutex mutex;
  std::shared_ptr<Mark> mark;  // the last record, or null

  std::shared_ptr<Mark> last() {
    std::lock_guard lock(mutex);
    return mark;
  }
};

struct CUstream_st {
  explicit CUstream_st(int its_priority) : priority(its_priority) {
    std::thread([this] { run(); }).detach();
  }

  const int priority;

  void enqueue(Work work) {
    std::lock_guard lock(mutex_);
    todo_.push_back(std::move(work));
    ++enqueued_;
    changed_.notify_all();
  }

  // Wait for what has been enqueued before this call.
  void synchronize() {
    std::unique_lock lock(mutex_);
    const auto wanted = enqueued_;
    changed_.wait(lock, [&] { return done_ >= wanted; });
  }

  bool is_idle() {
    std::lock_guard lock(mutex_);
    return done_ == enqueued_;
  }

  // The thread ends, and frees the stream, when all work is done.
  void destroy() {
    std::lock_guard lock(mutex_);
    is_destroyed_ = true;
    changed_.notify_all();
  }

 private:
  void run() {
    for (;;) {
      Work work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !todo_.empty() || is_destroyed_; });
        if (todo_.empty()) break;
        work = std::move(todo_.front());
        todo_.pop_front();
      }
      if (max_delay_us()) usleep(std::uniform_int_distribution<unsigned>(0, max_delay_us())(dice_));
      work();
      std::lock_guard lock(mutex_);
      ++done_;
      changed_.notify_all();
    }
    delete this;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> todo_;
  size_t enqueued_ = 0, done_ = 0;
  bool is_destroyed_ = false;
  std::minstd_rand dice_{std::random_device{}()};
};

namespace {

struct Allocation {
  size_t size;
  int fd;
  int mapped;        // how often an IPC handle was opened here; 0: allocated here
  std::string path;  // of the exporter's descriptor, if mapped
};

// All state of the process. Never destroyed, because threads of streams outlive `exit`.
struct Device {
  std::mutex mutex;
  std::map<char *, Allocation> memory;
  std::map<char *, size_t> pinned;
  std::set<cudaStream_t> streams;
  std::map<const void *, std::string> kernels;

  cudaStream_t default_stream() {
    static cudaStream_t made = new_stream(0);
    return made;
  }

  cudaStream_t new_stream(int priority) {
    auto *made = new CUstream_st(priority);
    std::lock_guard lock(mutex);
    streams.insert(made);
    return made;
  }

  void synchronize() {
    std::set<cudaStream_t> all;
    {
      std::lock_guard lock(mutex);
      all = streams;
    }
    for (auto *each : all) each->synchronize();
  }

  bool is_device(const void *address) {
    std::lock_guard lock(mutex);
    auto found = memory.upper_bound(const_cast<char *>(static_cast<const char *>(address)));
    if (found == memory.begin()) return false;
    --found;
    return address < found->first + found->second.size;
  }

  bool is_pinned(const void *address) {
    std::lock_guard lock(mutex);
    auto found = pinned.upper_bound(const_cast<char *>(static_cast<const char *>(address)));
    if (found == pinned.begin()) return false;
    --found;
    return address < found->first + found->second;
  }

  bool is_pageable(const void *address) { return !is_device(address) && !is_pinned(address); }
};

Device &device() {
  static auto *made = new Device;
  return *made;
}

cudaStream_t stream_of(cudaStream_t given) {
  return given == nullptr || given == cudaStreamLegacy ? device().default_stream() : given;
}

void *map_memory(int fd, size_t size) {
  void *made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return made == MAP_FAILED ? nullptr : made;
}

// Take an allocation out of the list and free it. The caller holds the lock.
void unmap(std::map<char *, Allocation>::iterator found) {
  munmap(found->first, found->second.size);
  close(found->second.fd);
  device().memory.erase(found);
}

// What is in a cudaIpcMemHandle_t.
struct MemHandle {
  int pid, fd;
  size_t size;
};

// Pinned memory is the host's, and by its own address the GPU's too.
bool fits(cudaMemcpyKind kind, const void *to, const void *from) {
  const bool to_device = device().is_device(to), from_device = device().is_device(from);
  if (device().is_pinned(to) || device().is_pinned(from)) return true;
  switch (kind) {
    case cudaMemcpyHostToHost: return !to_device && !from_device;
    case cudaMemcpyHostToDevice: return to_device && !from_device;
    case cudaMemcpyDeviceToHost: return !to_device && from_device;
    case cudaMemcpyDeviceToDevice: return to_device && from_device;
    default: return true;
  }
}

}  // namespace

// Devices and versions.

cudaError_t cudaGetDeviceCount(int *count) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  *count = visible == nullptr || *visible != 0;
  return *count ? cudaSuccess : last_error = cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int *number) {
  *number = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int number) {
  return number ? fail(cudaErrorInvalidDevice, "there is one GPU") : cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
  *version = VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *made, int number) {
  memset(made, 0, sizeof *made);
  snprintf(made->name, sizeof made->name, "CUDA shim over host memory");
  made->major = 9;
  made->totalGlobalMem = TOTAL_BYTES;
  made->multiProcessorCount = 132;
  made->warpSize = 32;
  made->maxThreadsPerBlock = 1024;
  made->maxThreadsPerMultiProcessor = 2048;
  made->maxThreadsDim[0] = made->maxThreadsDim[1] = 1024;
  made->maxThreadsDim[2] = 64;
  made->maxGridSize[0] = 0x7fffffff;
  made->maxGridSize[1] = made->maxGridSize[2] = 65535;
  made->sharedMemPerBlock = 48 << 10;
  made->regsPerBlock = 64 << 10;
  made->l2CacheSize = 50 << 20;
  memset(&made->uuid, number + 1, sizeof made->uuid);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int number) {
  cudaDeviceProp has;
  cudaGetDeviceProperties(&has, number);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = has.major; break;
    case cudaDevAttrMultiProcessorCount: *value = has.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = has.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = has.maxThreadsPerMultiProcessor; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *name, int size, int number) {
  snprintf(name, size, "0000:%02x:00.0", number + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = HIGHEST_PRIORITY;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  device().synchronize();
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
  *function = dlsym(RTLD_DEFAULT, name);
  const auto told = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (result) *result = told;
  return cudaSuccess;
}

// Errors.

cudaError_t cudaGetLastError() {
  const auto told = last_error;
  last_error = cudaSuccess;
  return told;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorDeviceUninitialized: return "cudaErrorDeviceUninitialized";
    case cudaErrorMapBufferObjectFailed: return "cudaErrorMapBufferObjectFailed";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "an error that the CUDA shim does not return";
  }
}
const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// Memory.

cudaError_t cudaMalloc(void **made, size_t size) {
  size_t free_bytes, total;
  cudaMemGetInfo(&free_bytes, &total);
  if (size > free_bytes) return last_error = cudaErrorMemoryAllocation;
  const int fd = memfd_create("cuda-shim", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, off_t(size)) || !(*made = map_memory(fd, size))) {
    if (fd >= 0) close(fd);
    return fail(cudaErrorMemoryAllocation, "the host has no memory left");
  }
  memset(*made, GARBAGE, size);
  std::lock_guard lock(device().mutex);
  device().memory[static_cast<char *>(*made)] = {size, fd, 0, ""};
  return cudaSuccess;
}
cudaError_t cudaFree(void *address) {
  if (!address) return cudaSuccess;
  device().synchronize();
  std::lock_guard lock(device().mutex);
  auto found = device().memory.find(static_cast<char *>(address));
  if (found == device().memory.end() || found->second.mapped)
    return fail(cudaErrorInvalidValue, "cudaFree of what cudaMalloc did not return");
  unmap(found);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  std::lock_guard lock(device().mutex);
  *free_bytes = *total = TOTAL_BYTES;
  for (auto &[address, each] : device().memory)
    if (!each.mapped) *free_bytes -= std::min(each.size, *free_bytes);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **made, size_t size, unsigned) {
  if (posix_memalign(made, 4096, size)) return last_error = cudaErrorMemoryAllocation;
  memset(*made, GARBAGE, size);
  return cudaHostRegister(*made, size, 0);
}
cudaError_t cudaFreeHost(void *address) {
  const auto error = cudaHostUnregister(address);
  if (!error) free(address);
  return error;
}
cudaError_t cudaHostRegister(void *address, size_t size, unsigned) {
  std::lock_guard lock(device().mutex);
  device().pinned[static_cast<char *>(address)] = size;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *address) {
  device().synchronize();
  std::lock_guard lock(device().mutex);
  return device().pinned.erase(static_cast<char *>(address))
             ? cudaSuccess
             : fail(cudaErrorInvalidValue, "this host memory is not pinned");
}
cudaError_t cudaHostGetDevicePointer(void **made, void *address, unsigned) {
  if (!device().is_pinned(address))
    return fail(cudaErrorInvalidValue, "this host memory is not pinned");
  *made = address;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *made, const void *address) {
  memset(made, 0, sizeof *made);
  auto *plain = const_cast<void *>(address);
  made->type = cudaMemoryTypeUnregistered;
  if (device().is_device(address)) {
    made->type = cudaMemoryTypeDevice;
    made->devicePointer = plain;
  } else if (device().is_pinned(address)) {
    made->type = cudaMemoryTypeHost;
    made->devicePointer = made->hostPointer = plain;
  }
  return cudaSuccess;
}

// Memory of other processes.

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *made, void *address) {
  std::lock_guard lock(device().mutex);
  auto found = device().memory.find(static_cast<char *>(address));
  if (found == device().memory.end() || found->second.mapped)
    return fail(cudaErrorInvalidValue, "only what cudaMalloc returned can be exported");
  const MemHandle handle{getpid(), found->second.fd, found->second.size};
  memset(made, 0, sizeof *made);
  memcpy(made, &handle, sizeof handle);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void **made, cudaIpcMemHandle_t given, unsigned flags) {
  MemHandle handle;
  memcpy(&handle, &given, sizeof handle);
  if (flags != cudaIpcMemLazyEnablePeerAccess)
    return fail(cudaErrorInvalidValue, "the flag must be cudaIpcMemLazyEnablePeerAccess");
  if (handle.pid == getpid())
    return fail(cudaErrorDeviceUninitialized, "a process cannot open a handle of its own");
  const auto path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return fail(cudaErrorMapBufferObjectFailed, "the exporter is gone");
  std::lock_guard lock(device().mutex);
  // A handle that is open already gives the same address again.
  struct stat wanted, has;
  fstat(fd, &wanted);
  for (auto &[address, each] : device().memory)
    if (each.path == path && !fstat(each.fd, &has) && has.st_ino == wanted.st_ino) {
      close(fd);
      ++each.mapped;
      *made = address;
      return cudaSuccess;
    }
  if (size_t(wanted.st_size) != handle.size || !(*made = map_memory(fd, handle.size))) {
    close(fd);
    return fail(cudaErrorMapBufferObjectFailed, "this is not an exported allocation");
  }
  device().memory[static_cast<char *>(*made)] = {handle.size, fd, 1, path};
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void *address) {
  device().synchronize();
  std::lock_guard lock(device().mutex);
  auto found = device().memory.find(static_cast<char *>(address));
  if (found == device().memory.end() || !found->second.mapped)
    return fail(cudaErrorInvalidValue, "this is not the address of an open handle");
  if (!--found->second.mapped) unmap(found);
  return cudaSuccess;
}

// Streams. Those that wait for the default stream are refused: torch makes none.

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
  if (flags != cudaStreamNonBlocking)
    return fail(cudaErrorNotSupported, "only streams that are non-blocking are there");
  *made = device().new_stream(std::clamp(priority, HIGHEST_PRIORITY, 0));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) {
  return cudaStreamCreateWithPriority(made, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    std::lock_guard lock(device().mutex);
    if (!device().streams.erase(stream))
      return last_error = cudaErrorInvalidResourceHandle;
  }
  stream->destroy();
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return stream_of(stream)->is_idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream_of(stream)->synchronize();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (auto mark = event->last()) stream_of(stream)->enqueue([mark] { mark->wait(); });
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *,
                                     const cudaGraphNode_t **, const cudaGraphEdgeData **,
                                     size_t *) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  stream_of(stream)->enqueue([=] { function(data); });
  return cudaSuccess;
}

// Events.

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned) {
  *made = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *made) { return cudaEventCreateWithFlags(made, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto mark = std::make_shared<Mark>();
  {
    std::lock_guard lock(event->mutex);
    event->mark = mark;
  }
  stream_of(stream)->enqueue([mark] { mark->reach(); });
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto mark = event->last();
  return !mark || mark->is_reached() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (auto mark = event->last()) mark->wait();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
  auto first = begin->last(), last = end->last();
  if (!first || !last) return last_error = cudaErrorInvalidResourceHandle;
  if (!first->is_reached() || !last->is_reached()) return last_error = cudaErrorNotReady;
  *ms = std::chrono::duration<float, std::milli>(last->reached_at() - first->reached_at()).count();
  return cudaSuccess;
}

// Copies.

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (!fits(kind, to, from))
    return fail(cudaErrorInvalidValue, "a copy whose kind is not that of its addresses");
  if (device().is_pageable(from)) {
    auto *begin = static_cast<const char *>(from);
    auto kept = std::make_shared<std::vector<char>>(begin, begin + size);
    stream_of(stream)->enqueue([=] { memcpy(to, kept->data(), size); });
  } else {
    stream_of(stream)->enqueue([=] { memcpy(to, from, size); });
  }
  if (device().is_pageable(to)) stream_of(stream)->synchronize();
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind) {
  const auto error = cudaMemcpyAsync(to, from, size, kind, nullptr);
  if (!error) stream_of(nullptr)->synchronize();
  return error;
}
cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *sizes,
                                 size_t count, cudaMemcpyAttributes *attributes, size_t *firsts,
                                 size_t attribute_count, cudaStream_t stream) {
  if (!stream || stream == cudaStreamLegacy)
    return fail(cudaErrorInvalidValue, "batches do not run on the default stream");
  if (!count || !attribute_count || firsts[0])
    return fail(cudaErrorInvalidValue, "a batch is empty, or its first copy has no attributes");
  for (size_t n = 0; n < attribute_count; ++n)
    if (attributes[n].srcAccessOrder != cudaMemcpySrcAccessOrderStream)
      return fail(cudaErrorNotSupported, "sources are read in the order of the stream only");
  struct Copy {
    void *to;
    const void *from;
    size_t size;
  };
  std::vector<Copy> copies;
  for (size_t n = 0; n < count; ++n) {
    if (device().is_pageable(to[n]) || device().is_pageable(from[n]))
      return fail(cudaErrorInvalidValue, "a copy of a batch has an address that is pageable");
    copies.push_back({to[n], from[n], sizes[n]});
  }
  std::shuffle(copies.begin(), copies.end(), std::minstd_rand(std::random_device{}()));
  stream->enqueue([copies] {
    for (auto &each : copies) memcpy(each.to, each.from, each.size);
  });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
  stream_of(stream)->enqueue([=] { memset(to, value, size); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t size) {
  cudaMemsetAsync(to, value, size, nullptr);
  stream_of(nullptr)->synchronize();
  return cudaSuccess;
}

// Kernels: what nvcc's code calls to register and launch them.

extern "C" {
void **__cudaRegisterFatBinary(void *) {
  static void *handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
char __cudaInitModule(void **) { return 1; }
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
void __cudaRegisterFunction(void **, const char *function, char *, const char *name, int, uint3 *,
                            uint3 *, dim3 *, dim3 *, int *) {
  std::lock_guard lock(device().mutex);
  device().kernels[function] = name;
}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *) { return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t *made, const void *function) {
  *made = reinterpret_cast<cudaKernel_t>(const_cast<void *>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                               size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
}

cudaError_t cudaLaunchKernel(const void *function, dim3, dim3, void **, size_t, cudaStream_t) {
  if (skips_kernels()) return cudaSuccess;
  std::string name = "a kernel without a name";
  {
    std::lock_guard lock(device().mutex);
    auto found = device().kernels.find(function);
    if (found != device().kernels.end()) name = found->second;
  }
  char *plain = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, nullptr);
  const auto why = "no kernel runs here: " + (plain ? plain : name).substr(0, 200);
  free(plain);
  return fail(cudaErrorNotSupported, why.c_str());
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *function, void **) {
  return cudaLaunchKernel(function, {}, {}, nullptr, 0, nullptr);
}

// What is asked of a kernel before its launch.

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *made, const void *) {
  memset(made, 0, sizeof *made);
  made->maxThreadsPerBlock = 1024;
  made->binaryVersion = made->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int,
                                                                   size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}
