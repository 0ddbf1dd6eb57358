/* A CUDA driver without a device, for what a host hands to a launch. Every launch is kept: its grid and the bytes of its
   parameters, whose sizes are told beforehand. A tensor map holds the address that it was made for, and its extents. */
#include <stdint.h>
#include <string.h>

#define MOST 128

typedef struct {
  unsigned int grid[3], block[3], shared;
  void *stream;
} Config;

static int sizes[MOST], num_sizes;
static unsigned char kept[MOST * 128];
static int kept_bytes, launches, encoded, last_grid;

void fake_sizes(const int *given, int count) {
  memcpy(sizes, given, count * sizeof(int));
  num_sizes = count;
}
int fake_launches(void) { return launches; }
int fake_encoded(void) { return encoded; }
int fake_grid(void) { return last_grid; }
int fake_kept(unsigned char *out) {
  memcpy(out, kept, kept_bytes);
  return kept_bytes;
}

int cuLaunchKernelEx(const Config *config, void *function, void **params, void **extra) {
  kept_bytes = 0;
  for (int i = 0; i < num_sizes; i++) {
    memcpy(kept + kept_bytes, params[i], sizes[i]);
    kept_bytes += sizes[i];
  }
  last_grid = config->grid[0];
  launches++;
  return 0;
}

int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *extents,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
  uint64_t *words = map;
  memset(map, 0, 128);
  words[0] = (uint64_t)address;
  words[1] = rank | (uint64_t)swizzle << 32;
  for (uint32_t i = 0; i < rank; i++) words[2 + i] = extents[i] ^ (uint64_t)box[i] << 40;
  encoded++;
  return 0;
}

int cuPointerGetAttribute(void *out, int which, uint64_t address) {
  *(uint64_t *)out = address;
  return 0;
}
int cuDeviceGetAttribute(int *out, int which, int device) {
  *out = 232448;
  return 0;
}
int cuFuncGetAttribute(int *out, int which, void *function) {
  *out = 1024;
  return 0;
}
int cuCtxGetCurrent(void **out) {
  *out = (void *)1;
  return 0;
}
int cuModuleLoadData(void **out, const void *image) {
  *out = (void *)2;
  return 0;
}
int cuModuleGetFunction(void **out, void *module, const char *name) {
  *out = (void *)3;
  return 0;
}
int cuGetErrorString(int code, const char **out) {
  *out = "a call that the fake driver does not know";
  return 0;
}
int cuStreamIsCapturing(void *stream, int *out) { return *out = 0; }
int cuModuleUnload(void *module) { return 0; }
int cuCtxGetDevice(int *out) { return *out = 0; }
int cuDriverGetVersion(int *out) {
  *out = 13000;
  return 0;
}
int cuDeviceGet(int *out, int number) { return *out = 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetLimit(size_t *out, int which) { return 0; }
int cuCtxSetLimit(int which, size_t value) { return 0; }
int cuDevicePrimaryCtxRetain(void **out, int device) { return 0; }
int cuFuncSetAttribute(void *function, int which, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int which) { return 0; }
int cuOccupancyMaxActiveClusters(int *out, void *function, const void *config) { return 0; }
