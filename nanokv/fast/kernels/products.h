// y = x · wᵀ for few rows of activations: weights are read once, in the format in which they are stored.
//
//     M rows of activations · N outputs · K inputs

#pragma once
#include "vectors.h"

// --- inner products: R rows of weights with one row of activations -----------------------------------------------------

// Four sums, so that no addition waits for the one before it.
template <class T>
static inline float dot(const T* w, const float* x, int64_t K) {
    f32x16 sum[4] = {};
    int64_t k = 0;
    for (; k + 64 <= K; k += 64)
        for (int i = 0; i < 4; i++) sum[i] += load16(w + k + 16 * i) * load16(x + k + 16 * i);
    for (; k + 16 <= K; k += 16) sum[0] += load16(w + k) * load16(x + k);
    float y = sum16((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; k < K; k++) y += to_float(w[k]) * x[k];
    return y;
}

static inline int64_t pairs_of(int64_t K) { return (K + 2 * GROUP - 1) / (2 * GROUP); }  // int4 packs groups in pairs

// Activations in 8 bits, a scale for each group: x ≈ codes · scale.
struct Codes {
    std::vector<int8_t> code;
    std::vector<float> scale, offset;  // offset = scale · (sum of the group's codes): what a zero point of 1 costs
    float total;                       // sum of the offsets
    void quantize(const float* x, int64_t K) {
        int64_t pairs = pairs_of(K);
        code.assign(pairs * 2 * GROUP, 0), scale.assign(pairs * 2, 0), offset.assign(pairs * 2, 0), total = 0;
        for (int64_t g = 0; g < K / GROUP; g++) {
            const float* xg = x + g * GROUP;
            float largest = 0;
            bool finite = true;
            for (int i = 0; i < GROUP; i++) largest = fmaxf(largest, fabsf(xg[i])), finite &= fabsf(xg[i]) <= FLT_MAX;
            float inverse = finite && largest > 1e-30f ? 127 / largest : 0;
            int sum = 0;
            for (int i = 0; i < GROUP; i++) sum += code[g * GROUP + i] = finite ? (int8_t)nearbyintf(xg[i] * inverse) : 0;
            scale[g] = finite ? largest / 127 : NAN;  // no code stands for NaN or infinity: the product becomes NaN
            offset[g] = scale[g] * sum, total += offset[g];
        }
    }
};

// Sums of 4 products in each of 8 lanes: unsigned weights × signed activations, 32 of each, exact in int32.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
typedef __m256i bytes32;
typedef __m256 f32x8;
static inline bytes32 load32(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline bytes32 plus128(bytes32 b) { return _mm256_xor_si256(b, _mm256_set1_epi8((char)128)); }
static inline bytes32 low4(bytes32 b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
static inline bytes32 high4(bytes32 b) { return low4(_mm256_srli_epi16(b, 4)); }
static inline f32x8 zero8() { return _mm256_setzero_ps(); }
static inline void add_products(f32x8& sum, bytes32 w, const int8_t* x, float scale) {
    __m256i products = _mm256_dpbusd_epi32(_mm256_setzero_si256(), w, load32(x));
    sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), _mm256_set1_ps(scale), sum);
}
static inline float sum8(f32x8 a, f32x8 b) {
    return _mm512_reduce_add_ps(_mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1));
}
#else
struct bytes32 { uint8_t b[32]; };
typedef float f32x8;
static inline bytes32 load32(const void* p) { bytes32 v; memcpy(&v, p, 32); return v; }
static inline bytes32 plus128(bytes32 v) { for (auto& b : v.b) b ^= 128; return v; }
static inline bytes32 low4(bytes32 v) { for (auto& b : v.b) b &= 15; return v; }
static inline bytes32 high4(bytes32 v) { for (auto& b : v.b) b >>= 4; return v; }
static inline f32x8 zero8() { return 0; }
static inline void add_products(f32x8& sum, bytes32 w, const int8_t* x, float scale) {
    int products = 0;
    for (int i = 0; i < 32; i++) products += w.b[i] * x[i];
    sum += products * scale;
}
static inline float sum8(f32x8 a, f32x8 b) { return a + b; }
#endif

// int8: one byte per weight, one scale per row. The instruction wants unsigned weights: 128 more, taken back at the end.
static inline float dot_int8(const uint8_t* w, float scale, const Codes& x, int64_t K) {
    f32x8 a = zero8(), b = zero8();
    int64_t k = 0, g = 0;
    for (; k + 64 <= K; k += 64, g += 2) {
        add_products(a, plus128(load32(w + k)), &x.code[k], x.scale[g]);
        add_products(b, plus128(load32(w + k + 32)), &x.code[k + 32], x.scale[g + 1]);
    }
    if (k < K) add_products(a, plus128(load32(w + k)), &x.code[k], x.scale[g]);
    return (sum8(a, b) - 128 * x.total) * scale;
}

// int4: 32 bytes hold two groups, one in the low halves and one in the high ones, stored as code + 8; a bf16 scale per group.
static inline float dot_int4(const uint8_t* w, const bf16* scale, const Codes& x, int64_t K, float* both) {
    int64_t groups = 2 * pairs_of(K);
    float offset = 0;
    for (int64_t g = 0; g < groups; g++) {
        float s = to_float(scale[g]);
        both[g] = s * x.scale[g], offset += s * x.offset[g];
    }
    f32x8 a = zero8(), b = zero8();
    for (int64_t g = 0; g < groups; g += 2) {
        bytes32 pair = load32(w + g * GROUP / 2);
        add_products(a, low4(pair), &x.code[g * GROUP], both[g]);
        add_products(b, high4(pair), &x.code[(g + 1) * GROUP], both[g + 1]);
    }
    return sum8(a, b) - 8 * offset;
}

// --- linear: y (M,N) = x (M,K) · wᵀ, optionally added to what y holds --------------------------------------------------

struct Weight {  // as nanokv/fast/native.py fills it
    const void* data;
    const void* scale;  // INT8: float (N); INT4: bf16 (N,K/32); else null
    const float* bias;  // (N) or null
    int64_t N, K;
    int32_t format;
};

#if defined(__AVX512BF16__)
// One row of bf16 weights with one of activations in bf16: 64 FLOPs an instruction.
static inline float dot_bf16(const bf16* w, const bf16* x, int64_t K) {
    __m512 sum[4] = {};
    for (int64_t k = 0, i = 0; k < K; k += 32, i = (i + 1) % 4)
        sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)_mm512_loadu_si512(w + k), (__m512bh)_mm512_loadu_si512(x + k));
    return _mm512_reduce_add_ps((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// For several rows of activations the arithmetic counts as much as the bytes: 64 FLOPs per instruction, one load for two
// instructions. y[4·c + r] = w_r · x_c for four rows of weights and four of activations. The processor would wait for
// memory and compute in turns. Therefore each step prefetches LINES cache lines of rows that come later.
const int TILE = 4, AHEAD = 8 * TILE;  // rows
template <int LINES>
static inline void tile_bf16(const bf16* w, int64_t rows, const bf16* x, int64_t K, const bf16* ahead, int64_t apart,
                             float* y) {
    const bf16* row[TILE];
    for (int r = 0; r < TILE; r++) row[r] = w + (r < rows ? r : 0) * K;
    f32x16 sum[TILE * TILE] = {};
    for (int64_t k = 0; k < K; k += 32) {
        for (int i = 0; i < LINES; i++) __builtin_prefetch(ahead + i * apart + k, 0, 2);
        __m512bh xk[TILE];
#pragma GCC unroll 4
        for (int c = 0; c < TILE; c++) xk[c] = (__m512bh)_mm512_loadu_si512(x + c * K + k);
#pragma GCC unroll 4
        for (int r = 0; r < TILE; r++) {
            __m512bh wk = (__m512bh)_mm512_loadu_si512(row[r] + k);
#pragma GCC unroll 4
            for (int c = 0; c < TILE; c++)
                sum[TILE * c + r] = (f32x16)_mm512_dpbf16_ps((__m512)sum[TILE * c + r], wk, xk[c]);
        }
    }
    *(f32x16*)y = sums16(sum);
}
#endif

static inline void put(float* y, const Weight& w, int64_t n, float value, bool add) {
    value += w.bias ? w.bias[n] : 0;
    y[n] = add ? y[n] + value : value;
}

struct Input {  // x in the form that the weights' format wants, made once for all threads
    const float* x;
    int64_t M;
    std::vector<Codes> codes;  // int8 and int4
    std::vector<bf16> half;    // bf16, where the processor multiplies it: rounded as torch rounds between two products
    Input(const float* x, int64_t M, const Weight& w) : x(x), M(M) {
        if (w.format >= INT8) {
            codes.resize(M);
            for (int64_t m = 0; m < M; m++) codes[m].quantize(x + m * w.K, w.K);
        }
#if defined(__AVX512BF16__)
        if (w.format == BF16 && w.K % 32 == 0) {
            half.resize((M + TILE - 1) / TILE * TILE * w.K);
            for (int64_t i = 0; i < M * w.K; i += 16) store16(&half[i], load16(x + i));
        }
#endif
    }
};

template <class T>
static void rows_dense(float* y, const Weight& w, const Input& in, int64_t n0, int64_t n1, bool add) {
    const T* data = (const T*)w.data;
    for (int64_t n = n0; n < n1; n++)
        for (int64_t m = 0; m < in.M; m++) put(y + m * w.N, w, n, dot(data + n * w.K, in.x + m * w.K, w.K), add);
}

#if defined(__AVX512BF16__)
// A tile of weights stays in the first-level cache while all rows of activations pass over it, four at a time; the passes
// share the rows that are fetched ahead among them.
static void rows_bf16(float* y, const Weight& w, const Input& in, int64_t n0, int64_t n1, bool add) {
    const bf16* data = (const bf16*)w.data;
    int64_t passes = (in.M + TILE - 1) / TILE, K = w.K;
    auto tile = passes == 1 ? tile_bf16<4> : passes < 4 ? tile_bf16<2> : tile_bf16<1>;
    for (int64_t n = n0; n < n1; n += TILE)
        for (int64_t pass = 0; pass < passes; pass++) {
            float sums[TILE * TILE];
            const bf16* ahead = data + (n + AHEAD + pass % TILE) * K;
            tile(data + n * K, n1 - n, &in.half[pass * TILE * K], K, ahead, passes == 1 ? K : passes * K, sums);
            for (int64_t m = pass * TILE; m < in.M && m < (pass + 1) * TILE; m++)
                for (int64_t r = 0; r < TILE && n + r < n1; r++) put(y + m * w.N, w, n + r, sums[m % TILE * TILE + r], add);
        }
}
#endif

// Rows n0 … n1−1 of the weights; called by every thread with a part of its own.
static void rows(float* y, const Weight& w, const Input& in, int64_t n0, int64_t n1, bool add) {
    int64_t pairs = pairs_of(w.K);
    std::vector<float> both(2 * pairs);
    if (w.format == FP32) return rows_dense<float>(y, w, in, n0, n1, add);
#if defined(__AVX512BF16__)
    const bf16* data = (const bf16*)w.data;
    if (!in.half.empty() && in.M == 1) {
        for (int64_t n = n0; n < n1; n++) put(y, w, n, dot_bf16(data + n * w.K, in.half.data(), w.K), add);
        return;
    }
    if (!in.half.empty()) return rows_bf16(y, w, in, n0, n1, add);
#endif
    if (w.format == BF16) return rows_dense<bf16>(y, w, in, n0, n1, add);
    for (int64_t n = n0; n < n1; n++) {
        for (int64_t m = 0; m < in.M; m++) {
            float value = w.format == INT8
                ? dot_int8((const uint8_t*)w.data + n * w.K, ((const float*)w.scale)[n], in.codes[m], w.K)
                : dot_int4((const uint8_t*)w.data + n * pairs * GROUP, (const bf16*)w.scale + n * pairs * 2, in.codes[m],
                           w.K, both.data());
            put(y + m * w.N, w, n, value, add);
        }
    }
}

// Parts of half a megabyte, handed out as threads ask for them: long enough for the memory to run ahead, and a thread
// that was interrupted holds nobody up for long.
static void multiply(float* y, const float* x, int64_t M, const Weight& w, bool add) {
    Input in(x, M, w);
    const int64_t bytes[] = {4 * w.K, 2 * w.K, w.K, w.K * 9 / 16};
    int64_t part = (1 << 19) / bytes[w.format], most = w.N / 4;
    part = part > most ? most : part;
    part = part < 8 ? 8 : part / 8 * 8;
#pragma omp parallel for schedule(dynamic) if (M * w.N * bytes[w.format] >= WORTH)
    for (int64_t n = 0; n < w.N; n += part) rows(y, w, in, n, n + part < w.N ? n + part : w.N, add);
}
