// matrix.h: how weight matrices lie in a GPU's memory, and how a kernel reads them.
//
// Rows one after another, each padded with zeros to a multiple of 32 values, so that 16-byte loads along `in` are
// aligned, coalesced, and never leave the matrix.
//   f32, f16, bf16: [out][padded in]
//   q8_0:           quants int8 [out][padded in], then scales f16 [out][padded in / 32]: ggml's 34 bytes a block
#pragma once
#include "gpu.h"

namespace ok {

constexpr int64_t kMatrixBlock = 32;  // values that share a q8_0 scale; rows are padded to a multiple of it

static inline __host__ __device__ int64_t padded_cols(int64_t in) {
    return (in + kMatrixBlock - 1) / kMatrixBlock * kMatrixBlock;
}

// ggml's block_q8_0, 34 bytes.
struct Q8Block {
    uint16_t scale;  // f16
    int8_t quant[kMatrixBlock];
};
static_assert(sizeof(Q8Block) == 34);

namespace {

// A matrix is read in parts: N neighbouring values of a row, kept as they are stored until they are wanted.
template <class T>
struct FloatMatrix {
    using Value = T;                              // what a matmul rounds its input to
    static constexpr int kLoad = 16 / sizeof(T);  // values in 16 bytes
    template <int N>
    struct Part {
        alignas(N * sizeof(T)) T value[N];
        __device__ float get(int i) const { return widen(value[i]); }
    };
    const T *weight;
    int64_t cols;

    __device__ FloatMatrix(const void *packed, int64_t, int64_t in)
        : weight(static_cast<const T *>(packed)), cols(padded_cols(in)) {}
    __device__ float value(int64_t row, int64_t k) const { return widen(weight[row * cols + k]); }
    template <int N>
    __device__ Part<N> load(int64_t row, int64_t k) const {  // k: a multiple of N
        return load_aligned<Part<N>>(weight + row * cols + k);
    }
};

// N quants as they are loaded: kept as words until they are wanted, or they would take a register each.
template <int N>
struct Quants {
    alignas(N) uint32_t word[N / 4];
    __device__ float get(int i) const { return static_cast<float>(static_cast<int8_t>(word[i / 4] >> i % 4 * 8)); }
};

struct Q8Matrix {
    using Value = float;
    static constexpr int kLoad = 16;
    template <int N>
    struct Part {
        Quants<N> quants;
        f16 scale;
        __device__ float get(int i) const { return widen(scale) * quants.get(i); }
    };
    struct Row {
        const int8_t *quants;
        const f16 *scales;
        template <int N>
        __device__ Part<N> load(int k) const {
            return {load_aligned<Quants<N>>(quants + k), scales[static_cast<uint32_t>(k) / kMatrixBlock]};
        }
    };
    const int8_t *quants;
    const f16 *scales;
    int64_t cols;

    __device__ Q8Matrix(const void *packed, int64_t out, int64_t in)
        : quants(static_cast<const int8_t *>(packed)), scales(nullptr), cols(padded_cols(in)) {
        scales = reinterpret_cast<const f16 *>(quants + out * cols);
    }
    __device__ float value(int64_t row, int64_t k) const {
        const int64_t at = row * cols + k;
        return widen(scales[at / kMatrixBlock]) * static_cast<float>(quants[at]);
    }
    __device__ Row row(int64_t index) const { return {quants + index * cols, scales + index * cols / kMatrixBlock}; }
    template <int N>
    __device__ Part<N> load(int64_t index, int64_t k) const {
        return row(index).template load<N>(static_cast<int>(k));
    }
};

// The same matrix, its quants and scales apart.
struct Q8Quants {
    template <int N>
    using Part = Quants<N>;
    Q8Matrix matrix;

    __device__ Q8Quants(const void *packed, int64_t out, int64_t in) : matrix(packed, out, in) {}
    template <int N>
    __device__ Part<N> load(int64_t row, int64_t k) const {
        return load_aligned<Part<N>>(matrix.quants + row * matrix.cols + k);
    }
    __device__ float scale(int64_t row, int64_t k) const {
        return widen(matrix.scales[(row * matrix.cols + k) / kMatrixBlock]);
    }
};

}  // namespace
}  // namespace ok
