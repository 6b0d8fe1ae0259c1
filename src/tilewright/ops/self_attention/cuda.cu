// Attention of short sequences: a block for each head of each sequence, which lies in shared memory as a whole.
//
// Scores: a warp for each query, its lanes across keys. Weighted sums: its lanes across the elements of a head. Rows in
// shared memory are of an odd number of floats, so that both read without bank conflicts. All arithmetic is in float32,
// and no sum depends on which block or warp comes first.
#include "cuda.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace tilewright {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kKeys = kLongest / 32;  // of a lane
constexpr unsigned kAll = 0xffffffffu;
constexpr float kNever = -INFINITY;

struct Sizes {
  int sequence, heads, head_dim;
  float scale;
  bool causal;
};

__device__ float load(float x) { return x; }
__device__ float load(__half x) { return __half2float(x); }
__device__ float load(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void store(float* to, float x) { *to = x; }
__device__ void store(__half* to, float x) { *to = __float2half_rn(x); }
__device__ void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

__device__ float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, step));
  return x;
}

__device__ float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

// Copies the rows of a head; columns from head_dim to D are 0.
template <typename T, int D>
__device__ void load_rows(const Sizes& sizes, const T* from, int stride, float* to) {
  for (int i = threadIdx.x; i < sizes.sequence * D; i += kThreads) {
    const int row = i / D, column = i % D;
    to[row * (D + 1) + column] = column < sizes.head_dim ? load(from[row * stride + column]) : 0.0f;
  }
}

template <int D>
__device__ float dot(const float* a, const float* b) {
  float sum = 0.0f;
#pragma unroll
  for (int d = 0; d < D; ++d) sum = fmaf(a[d], b[d], sum);
  return sum;
}

// The sum of rows of `values`, each times a weight, for the column of this lane; the weights are `step` floats apart.
template <int D>
__device__ float weighted_sum(int count, const float* weights, int step, const float* values, int column) {
  float sum = 0.0f;
  for (int j = 0; j < count; ++j) sum = fmaf(weights[j * step], values[j * (D + 1) + column], sum);
  return sum;
}

__device__ bool sees(const Sizes& sizes, const bool* key_mask, int query, int key) {
  return key < sizes.sequence && (!sizes.causal || key <= query) && (key_mask == nullptr || key_mask[key]);
}

template <typename T, int D>
__global__ void __launch_bounds__(kThreads) tilewright_self_attention_forward(
    Sizes sizes, const T* qkv, const bool* key_mask, T* context, float* lse) {
  extern __shared__ float memory[];
  const int length = sizes.sequence, size = length * (D + 1);
  float *q = memory, *k = q + size, *v = k + size, *weights = v + size;  // weights: a row for each warp
  const int batch = blockIdx.x / sizes.heads, head = blockIdx.x % sizes.heads;
  const int width = sizes.heads * sizes.head_dim, first = head * sizes.head_dim;
  const long token = static_cast<long>(batch) * length;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (key_mask != nullptr) key_mask += token;
  qkv += token * 3 * width + first;
  load_rows<T, D>(sizes, qkv, 3 * width, q);
  load_rows<T, D>(sizes, qkv + width, 3 * width, k);
  load_rows<T, D>(sizes, qkv + 2 * width, 3 * width, v);
  __syncthreads();

  float* own = weights + warp * kLongest;
  for (int i = warp; i < length; i += kWarps) {
    float score[kKeys], most = kNever, total = 0.0f;
    bool sees_one = false;
#pragma unroll
    for (int c = 0; c < kKeys; ++c) {
      const int j = lane + 32 * c;
      const bool is_seen = sees(sizes, key_mask, i, j);
      score[c] = is_seen ? sizes.scale * dot<D>(q + i * (D + 1), k + j * (D + 1)) : kNever;
      most = fmaxf(most, score[c]);
      sees_one |= is_seen;
    }
    most = warp_max(most);
    const bool is_blind = !__any_sync(kAll, sees_one);  // its context is 0; of scores that are all NaN it is NaN
#pragma unroll
    for (int c = 0; c < kKeys; ++c) {
      score[c] = is_blind ? 0.0f : expf(score[c] - most);
      total += score[c];
    }
    total = warp_sum(total);
    const float share = is_blind ? 0.0f : 1.0f / total;
#pragma unroll
    for (int c = 0; c < kKeys; ++c) own[lane + 32 * c] = score[c] * share;
    __syncwarp();
    for (int d = lane; d < sizes.head_dim; d += 32) {
      store(context + (token + i) * width + first + d, weighted_sum<D>(length, own, 1, v, d));
    }
    if (lane == 0) lse[static_cast<long>(blockIdx.x) * length + i] = is_blind ? INFINITY : most + logf(total);
    __syncwarp();
  }
}

template <typename T, int D>
__global__ void __launch_bounds__(kThreads) tilewright_self_attention_backward(
    Sizes sizes, const T* qkv, const bool* key_mask, const T* d_context, const float* lse, T* d_qkv) {
  extern __shared__ float memory[];
  const int length = sizes.sequence, size = length * (D + 1), pitch = length + 1;
  float *q = memory, *k = q + size, *v = k + size, *g = v + size, *weights = g + size, *slopes = weights + length * pitch;
  const int batch = blockIdx.x / sizes.heads, head = blockIdx.x % sizes.heads;
  const int width = sizes.heads * sizes.head_dim, first = head * sizes.head_dim;
  const long token = static_cast<long>(batch) * length;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (key_mask != nullptr) key_mask += token;
  qkv += token * 3 * width + first;
  d_qkv += token * 3 * width + first;
  load_rows<T, D>(sizes, qkv, 3 * width, q);
  load_rows<T, D>(sizes, qkv + width, 3 * width, k);
  load_rows<T, D>(sizes, qkv + 2 * width, 3 * width, v);
  load_rows<T, D>(sizes, d_context + token * width + first, width, g);
  __syncthreads();

  for (int i = warp; i < length; i += kWarps) {
    const float sum = lse[static_cast<long>(blockIdx.x) * length + i];
    float weight[kKeys], slope[kKeys], mean = 0.0f;
#pragma unroll
    for (int c = 0; c < kKeys; ++c) {
      const int j = lane + 32 * c;
      const bool is_seen = sees(sizes, key_mask, i, j);
      weight[c] = is_seen ? expf(sizes.scale * dot<D>(q + i * (D + 1), k + j * (D + 1)) - sum) : 0.0f;
      slope[c] = is_seen ? dot<D>(g + i * (D + 1), v + j * (D + 1)) : 0.0f;
      mean = fmaf(weight[c], slope[c], mean);
    }
    mean = warp_sum(mean);
#pragma unroll
    for (int c = 0; c < kKeys; ++c) {
      const int j = lane + 32 * c;
      if (j < length) {
        weights[i * pitch + j] = weight[c];
        slopes[i * pitch + j] = weight[c] * (slope[c] - mean) * sizes.scale;
      }
    }
  }
  __syncthreads();

  for (int row = warp; row < length; row += kWarps) {
    T* to = d_qkv + static_cast<long>(row) * 3 * width;
    for (int d = lane; d < sizes.head_dim; d += 32) {
      store(to + d, weighted_sum<D>(length, slopes + row * pitch, 1, k, d));
      store(to + width + d, weighted_sum<D>(length, slopes + row, pitch, q, d));
      store(to + 2 * width + d, weighted_sum<D>(length, weights + row, pitch, g, d));
    }
  }
}

template <typename Kernel, typename... Arguments>
cudaError_t start(Kernel kernel, const Heads& heads, int floats, cudaStream_t stream, Arguments... arguments) {
  const int bytes = floats * static_cast<int>(sizeof(float));
  if (bytes > 48 * 1024) {  // what a kernel may take without being told
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  kernel<<<heads.batch * heads.heads, kThreads, bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

// Calls `call` with a number of the dtype, and the elements of a head that the kernel is compiled for.
template <typename Call>
cudaError_t for_kernel(const Heads& heads, const Call& call) {
  const auto for_width = [&](auto zero) {
    if (heads.head_dim <= 8) return call(zero, std::integral_constant<int, 8>());
    if (heads.head_dim <= 16) return call(zero, std::integral_constant<int, 16>());
    if (heads.head_dim <= 32) return call(zero, std::integral_constant<int, 32>());
    if (heads.head_dim <= 64) return call(zero, std::integral_constant<int, 64>());
    return call(zero, std::integral_constant<int, kWidest>());
  };
  if (heads.element == Element::kHalf) return for_width(__half());
  if (heads.element == Element::kBFloat16) return for_width(__nv_bfloat16());
  return for_width(float());
}

Sizes sizes_of(const Heads& heads) {
  return {heads.sequence, heads.heads, heads.head_dim, 1.0f / sqrtf(static_cast<float>(heads.head_dim)), heads.causal};
}

}  // namespace

cudaError_t attend(const Heads& heads, const void* qkv, void* context, float* lse, cudaStream_t stream) {
  return for_kernel(heads, [&](auto zero, auto columns) {
    using T = decltype(zero);
    constexpr int D = decltype(columns)::value;
    const int floats = 3 * heads.sequence * (D + 1) + kWarps * kLongest;
    return start(
        tilewright_self_attention_forward<T, D>, heads, floats, stream, sizes_of(heads), static_cast<const T*>(qkv),
        heads.key_mask, static_cast<T*>(context), lse);
  });
}

cudaError_t differentiate(
    const Heads& heads, const void* qkv, const void* d_context, const float* lse, void* d_qkv, cudaStream_t stream) {
  return for_kernel(heads, [&](auto zero, auto columns) {
    using T = decltype(zero);
    constexpr int D = decltype(columns)::value;
    const int floats = 4 * heads.sequence * (D + 1) + 2 * heads.sequence * (heads.sequence + 1);
    return start(
        tilewright_self_attention_backward<T, D>, heads, floats, stream, sizes_of(heads), static_cast<const T*>(qkv),
        heads.key_mask, static_cast<const T*>(d_context), lse, static_cast<T*>(d_qkv));
  });
}

}  // namespace tilewright
