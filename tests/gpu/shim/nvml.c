/* A stand-in for libnvidia-ml.so.1, by which torch and vLLM look at a GPU before they use it. What is
   not here, the callers miss by name. No package that we install has a header of it. */

#include <string.h>

enum { SUCCESS = 0 };
struct memory {
  unsigned long long total, available, used;
};

static int copy(char *to, unsigned size, const char *text) {
  strncpy(to, text, size);
  return SUCCESS;
}

int nvmlInit(void) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return (int)flags; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) { return error ? "not in the CUDA shim" : "success"; }
int nvmlSystemGetDriverVersion(char *to, unsigned size) { return copy(to, size, "580.0"); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = 13000;
  return SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = 1;
  return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned number, const void **device) {
  static const char devices[1];
  *device = &devices[number];
  return SUCCESS;
}
int nvmlDeviceGetName(const void *device, char *to, unsigned size) {
  (void)device;
  return copy(to, size, "CUDA shim over host memory");
}
int nvmlDeviceGetUUID(const void *device, char *to, unsigned size) {
  (void)device;
  return copy(to, size, "GPU-01010101-0101-0101-0101-010101010101");
}
int nvmlDeviceGetCudaComputeCapability(const void *device, int *major, int *minor) {
  (void)device;
  *major = 9;
  *minor = 0;
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(const void *device, struct memory *made) {
  (void)device;
  made->total = made->available = 8ull << 30;
  made->used = 0;
  return SUCCESS;
}
