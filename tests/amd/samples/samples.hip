// samples.hip: small kernels in the library's style, one for each technique its kernels use, so that the stand-in, the
// executor and the static facts are tested on code that does not change when the library does. BUG (a number when compiled
// for a card, a variable in the stand-in) gives one of them a mistake that the harness must find.
#include <hip/hip_runtime.h>

#ifndef BUG
#define BUG 0
#endif
enum Bug {
    missing_barrier = 1,      // block_sum: no barrier before the partial sums are read
    wrong_bound = 2,          // scale_add: one element too many
    fixed_wave_size = 3,      // wave_sum: 32, whatever the wave size
    wrong_fragment_row = 4,   // matmul_matrix: D's rows read in the other architecture's order
    lanes_not_repeated = 5,   // matmul_matrix: lanes 16-31 hold the other half of k
    softmax_without_max = 6,  // attend: overflows for large scores
    divergent_barrier = 7,    // rms_norm: a barrier that only some lanes reach
    missing_wave_sum = 8,     // matvec_dot2: every lane stores its own part
    barrier_too_early = 9,    // matmul_matrix: tiles are overwritten while others still read
    signed_as_unsigned = 10   // matvec_q8: activations' bytes read without sign
};

#if defined(__gfx90a__) || defined(__gfx942__)
#define HAVE_MFMA 1
#elif defined(__gfx1100__) || defined(__gfx1101__) || defined(__gfx1102__) || defined(__gfx1151__)
#define HAVE_WMMA 1
#elif defined(__gfx1200__) || defined(__gfx1201__)
#define HAVE_WMMA_GFX12 1
#endif
#if !HAVE_MFMA
#define HAVE_DOT4_UNSIGNED_MIX (HAVE_WMMA || HAVE_WMMA_GFX12)
#endif

#define WAVE (BUG == fixed_wave_size ? 32 : warpSize)

typedef _Float16 half2_t __attribute__((ext_vector_type(2)));
typedef _Float16 half4_t __attribute__((ext_vector_type(4)));
typedef _Float16 half8_t __attribute__((ext_vector_type(8)));
typedef _Float16 half16_t __attribute__((ext_vector_type(16)));
typedef float float4_t __attribute__((ext_vector_type(4)));
typedef float float8_t __attribute__((ext_vector_type(8)));

static __device__ float wave_sum(float value) {
    for (int distance = WAVE / 2; distance > 0; distance /= 2) value += __shfl_xor(value, distance);
    return value;
}

// Sum over the block, in every lane. Blocks are a multiple of the wave size, at most 1024 lanes.
static __device__ float block_sum(float value) {
    __shared__ float parts[32];
    const int warp = threadIdx.x / WAVE, warps = blockDim.x / WAVE;
    value = wave_sum(value);
    if (threadIdx.x % WAVE == 0) parts[warp] = value;
    if (BUG != missing_barrier) __syncthreads();
    float sum = 0;
    for (int i = 0; i < warps; ++i) sum += parts[i];
    __syncthreads();
    return sum;
}

// y += a x.
extern "C" __global__ void scale_add(float *y, const float *x, float a, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n + (BUG == wrong_bound)) y[i] += a * x[i];
}

// y = x / sqrt(mean(x^2) + eps) * weight, one block a row.
extern "C" __global__ void rms_norm(float *y, const float *x, const float *weight, int cols, float eps) {
    const float *row = x + size_t(blockIdx.x) * cols;
    float sum = 0;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) {
        sum += row[c] * row[c];
        if (BUG == divergent_barrier) __syncthreads();
    }
    const float scale = 1.0f / sqrtf(block_sum(sum) / cols + eps);
    for (int c = threadIdx.x; c < cols; c += blockDim.x) y[size_t(blockIdx.x) * cols + c] = row[c] * scale * weight[c];
}

// y[o] = sum_i x[i] weight[o, i], one wave an output, f16 pairs; `in` even.
extern "C" __global__ void matvec_dot2(float *y, const _Float16 *x, const _Float16 *weight, int out, int in) {
    const int lane = threadIdx.x % warpSize, o = (blockIdx.x * blockDim.x + threadIdx.x) / warpSize;
    if (o >= out) return;
    const half2_t *xs = (const half2_t *)x, *ws = (const half2_t *)(weight + size_t(o) * in);
    float sum = 0;
    for (int i = lane; i < in / 2; i += warpSize) {
#if HAVE_WMMA || HAVE_WMMA_GFX12 || HAVE_MFMA || defined(__gfx1030__)
        sum = __builtin_amdgcn_fdot2(xs[i], ws[i], sum, false);
#else
        sum += float(xs[i][0]) * float(ws[i][0]) + float(xs[i][1]) * float(ws[i][1]);
#endif
    }
    if (BUG != missing_wave_sum) sum = wave_sum(sum);
    if (BUG == missing_wave_sum || lane == 0) y[o] = sum;
}

// q8_0 weights, q8_0 activations: y[o] = sum_b dx[b] dw[o, b] sum_i qx[b, i] qw[o, b, i]; one lane an output.
extern "C" __global__ void matvec_q8(float *y, const int *qx, const float *dx, const int *qw, const _Float16 *dw,
                                     int out, int blocks) {
    const int o = blockIdx.x * blockDim.x + threadIdx.x;
    if (o >= out) return;
    float sum = 0;
    for (int b = 0; b < blocks; ++b) {
        int dot = 0;
        for (int i = 0; i < 8; ++i) {
            const int a = qx[b * 8 + i], w = qw[(size_t(o) * blocks + b) * 8 + i];
#if HAVE_DOT4_UNSIGNED_MIX
            dot = __builtin_amdgcn_sudot4(BUG != signed_as_unsigned, a, true, w, dot, false);
#elif defined(__gfx1030__) || HAVE_MFMA
            dot = __builtin_amdgcn_sdot4(a, w, dot, false);
#else
            for (int j = 0; j < 4; ++j) dot += int(signed char)(a >> 8 * j) * int(signed char)(w >> 8 * j);
#endif
        }
        sum += dx[b] * float(dw[size_t(o) * blocks + b]) * float(dot);
    }
    y[o] = sum;
}

// C (rows, cols) = A (rows, depth) B^T (cols, depth): f16 in, f32 out. Each wave of a block of two computes a 16 x 16 tile,
// one below the other, and shares B's tile in LDS; rows are a multiple of 32, the rest of 16. Without a matrix unit each lane
// of the wave computes its share of the tile.
extern "C" __global__ void matmul_matrix(float *c, const _Float16 *a, const _Float16 *b, int cols, int depth) {
    __shared__ _Float16 as[32][16], bs[16][16];
    const int lane = threadIdx.x % warpSize, wave = threadIdx.x / warpSize, column = lane % 16, part = lane / 16;
    const int row0 = blockIdx.y * 32, col0 = blockIdx.x * 16, own = wave * 16;
    constexpr int n = 256 / warpSize;
    float d[n] = {};
    for (int k0 = 0; k0 < depth; k0 += 16) {
        for (int i = threadIdx.x; i < 512; i += blockDim.x)
            as[i / 16][i % 16] = a[size_t(row0 + i / 16) * depth + k0 + i % 16];
        for (int i = threadIdx.x; i < 256; i += blockDim.x)
            bs[i / 16][i % 16] = b[size_t(col0 + i / 16) * depth + k0 + i % 16];
        __syncthreads();
#if HAVE_WMMA
        half16_t fa, fb;
        for (int k = 0; k < 16; ++k) {
            const int at = BUG == lanes_not_repeated ? (k + 8 * part) % 16 : k;
            fa[k] = as[own + column][at], fb[k] = bs[column][at];
        }
        float8_t acc;
        for (int i = 0; i < 8; ++i) acc[i] = d[i];
        acc = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(fa, fb, acc);
        for (int i = 0; i < 8; ++i) d[i] = acc[i];
#elif HAVE_WMMA_GFX12
        half8_t fa, fb;
        for (int k = 0; k < 8; ++k) fa[k] = as[own + column][8 * part + k], fb[k] = bs[column][8 * part + k];
        float8_t acc;
        for (int i = 0; i < 8; ++i) acc[i] = d[i];
        acc = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(fa, fb, acc);
        for (int i = 0; i < 8; ++i) d[i] = acc[i];
#elif HAVE_MFMA
        half4_t fa, fb;
        for (int k = 0; k < 4; ++k) fa[k] = as[own + column][4 * part + k], fb[k] = bs[column][4 * part + k];
        float4_t acc = {d[0], d[1], d[2], d[3]};
        acc = __builtin_amdgcn_mfma_f32_16x16x16f16(fa, fb, acc, 0, 0, 0);
        for (int i = 0; i < 4; ++i) d[i] = acc[i];
#else
        for (int i = 0; i < n; ++i)
            for (int k = 0; k < 16; ++k) d[i] += float(as[own + n * part + i][k]) * float(bs[column][k]);
#endif
        if (BUG != barrier_too_early) __syncthreads();
    }
    for (int i = 0; i < n; ++i) {
#if HAVE_WMMA
        const int row = BUG == wrong_fragment_row ? 8 * part + i : 2 * i + part;
#else
        const int row = BUG == wrong_fragment_row ? 2 * i + part : n * part + i;
#endif
        c[size_t(row0 + own + row) * cols + col0 + column] = d[i];
    }
}

// One query against `length` keys, one block a head: softmax in dynamic LDS of `length` floats, then the values.
extern "C" __global__ void attend(float *y, const float *q, const float *k, const float *v, int length, int head_dim,
                                  float scale) {
    HIP_DYNAMIC_SHARED(float, score)
    __shared__ float peaks[32];
    const size_t head = blockIdx.x;
    k += head * length * head_dim, v += head * length * head_dim, q += head * head_dim, y += head * head_dim;
    float peak = -__builtin_inff();
    for (int t = threadIdx.x; t < length; t += blockDim.x) {
        float dot = 0;
        for (int d = 0; d < head_dim; ++d) dot += q[d] * k[size_t(t) * head_dim + d];
        score[t] = dot * scale;
        peak = fmaxf(peak, score[t]);
    }
    for (int distance = WAVE / 2; distance > 0; distance /= 2) peak = fmaxf(peak, __shfl_xor(peak, distance));
    if (threadIdx.x % WAVE == 0) peaks[threadIdx.x / WAVE] = peak;
    __syncthreads();
    for (int i = 0; i < int(blockDim.x / WAVE); ++i) peak = fmaxf(peak, peaks[i]);
    if (BUG == softmax_without_max) peak = 0;
    float sum = 0;
    for (int t = threadIdx.x; t < length; t += blockDim.x) {
        score[t] = expf(score[t] - peak);
        sum += score[t];
    }
    sum = block_sum(sum);
    for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float dot = 0;
        for (int t = 0; t < length; ++t) dot += score[t] * v[size_t(t) * head_dim + d];
        y[d] = dot / sum;
    }
}

// Philox4x32-10 (Salmon et al. 2011): word 0 for counter = i, key = seed.
extern "C" __global__ void philox(unsigned *y, unsigned long long seed, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned counter[4] = {unsigned(i), 0, 0, 0}, key[2] = {unsigned(seed), unsigned(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const unsigned long long p0 = 0xD2511F53ull * counter[0], p1 = 0xCD9E8D57ull * counter[2];
        const unsigned c1 = counter[1], c3 = counter[3];
        counter[0] = unsigned(p1 >> 32) ^ c1 ^ key[0];
        counter[1] = unsigned(p1);
        counter[2] = unsigned(p0 >> 32) ^ c3 ^ key[1];
        counter[3] = unsigned(p0);
        key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
    }
    y[i] = counter[0];
}

// Histogram of bytes: LDS atomics, a vote, then global atomics.
extern "C" __global__ void histogram(unsigned *bins, const unsigned char *x, int n) {
    __shared__ unsigned local[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) local[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[x[i]], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        if (local[i]) atomicAdd(&bins[i], local[i]);
}

// Every block stores to the same place: never right.
extern "C" __global__ void everyone_stores(unsigned *y) { y[threadIdx.x] = blockIdx.x; }
