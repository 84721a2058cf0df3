/* What torch and vLLM ask of libcuda.so.1, the driver's library. build.py adds the other symbols that
   they name: they refuse every call. */

#include <cuda.h>
#include <string.h>

CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

/* There is one context, and it is always current. */
CUresult cuCtxGetCurrent(CUcontext *context) {
  static char only;
  *context = (CUcontext)&only;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *is_active) {
  (void)device;
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  (void)error;
  *text = "not in the CUDA shim";
  return CUDA_SUCCESS;
}

/* FlashAttention 3 makes such a description of its tensors before each launch. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  (void)type, (void)rank, (void)address, (void)sizes, (void)strides, (void)box;
  (void)element_strides, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
  memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}
