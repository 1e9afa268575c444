// Numbers and vectors that the kernels share: bf16, sixteen floats at a time, and what is done with them.
//
// Vectors are GCC's and clang's portable vector types: a machine with narrower registers uses several of them. Intrinsics
// stand only where a processor has an instruction that no portable expression becomes.

#pragma once
#include <cfloat>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float    f32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef float    f32x4  __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t  i32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint8_t  u8x16  __attribute__((vector_size(16), aligned(1), may_alias));
typedef int8_t   i8x16  __attribute__((vector_size(16), aligned(1), may_alias));

struct bf16 { uint16_t bits; };  // the upper half of a float

enum Format { FP32, BF16, INT8, INT4 };
const int64_t WORTH = 1 << 18;  // bytes to touch (or as much arithmetic) from which on a second thread is asked
const int MANY = 8;  // rows of activations from which on what is done with each of them is shared among threads
const int GROUP = 32;  // inputs that share a scale: of the activations for int8 and int4, of the weights for int4

// --- numbers -----------------------------------------------------------------------------------------------------------

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline void store(float* to, float x) { *to = x; }
static inline void store(bf16* to, float x) {  // to nearest, ties to even, as torch rounds
    uint32_t bits;
    memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static inline f32x16 load16(const float* p) { return *(const f32x16*)p; }
static inline f32x16 load16(const bf16* p) {
#if defined(__AVX512F__)  // gcc 12 takes several instructions for what is one
    u32x16 wide = (u32x16)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16;
#else
    u32x16 wide = __builtin_convertvector(*(const u16x16*)p, u32x16) << 16;
#endif
    return (f32x16)wide;
}
static inline f32x16 load16(const int8_t* p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
    return __builtin_convertvector(*(const i8x16*)p, f32x16);
#endif
}
static inline void store16(float* p, f32x16 v) { *(f32x16*)p = v; }
static inline void store16(bf16* p, f32x16 v) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &half, 32);
#else
    for (int i = 0; i < 16; i++) store(p + i, v[i]);
#endif
}
static inline float sum16(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s = 0;
    for (int i = 0; i < 16; i++) s += v[i];
    return s;
#endif
}

static inline f32x16 abs16(f32x16 v) { return v < 0.f ? -v : v; }
static inline f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }
static inline float max16(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int i = 1; i < 16; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}
static inline int round16(f32x16 v, int8_t* to) {  // to nearest, ties to even; the sum of what was written
#if defined(__AVX512F__)
    __m512i codes = _mm512_cvtps_epi32((__m512)v);
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(codes));
    return _mm512_reduce_add_epi32(codes);
#else
    int sum = 0;
    for (int i = 0; i < 16; i++) sum += to[i] = (int8_t)nearbyintf(v[i]);
    return sum;
#endif
}

// The sums of sixteen vectors, together: 45 instructions instead of 200.
static inline f32x16 sums16(const f32x16* v) {
#if defined(__AVX512F__)
    __m512 two[8], four[4], half[2];
    const __m512* s = (const __m512*)v;
    for (int i = 0; i < 8; i++)
        two[i] = _mm512_unpacklo_ps(s[2 * i], s[2 * i + 1]) + _mm512_unpackhi_ps(s[2 * i], s[2 * i + 1]);
    for (int i = 0; i < 4; i++) {
        __m512d a = (__m512d)two[2 * i], b = (__m512d)two[2 * i + 1];
        four[i] = (__m512)_mm512_unpacklo_pd(a, b) + (__m512)_mm512_unpackhi_pd(a, b);
    }
    for (int i = 0; i < 2; i++)
        half[i] = _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x88) +
                  _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xdd);
    return (f32x16)(_mm512_shuffle_f32x4(half[0], half[1], 0x88) + _mm512_shuffle_f32x4(half[0], half[1], 0xdd));
#else
    f32x16 sums;
    for (int i = 0; i < 16; i++) sums[i] = sum16(v[i]);
    return sums;
#endif
}

// Keeps what is in it in one piece, where sums may be taken in any order (-fassociative-math).
#if defined(__has_builtin)
#if __has_builtin(__builtin_assoc_barrier)  // GCC 12
#define IN_ORDER(x) __builtin_assoc_barrier(x)
#elif __has_builtin(__arithmetic_fence)  // clang
#define IN_ORDER(x) __arithmetic_fence(x)
#endif
#endif
#ifndef IN_ORDER
#define IN_ORDER(x) (x)
#endif

// e^x to 2.6e-7: 2^n · e^r with |r| ≤ ln(2)/2, e^r by its series. ln(2) is subtracted in two parts, the first of which has
// few enough bits that n times it is exact; both parts in one would make an error of 4e-6. Below −87 it stays at
// e^−87 = 1.6e-38; from 88.4 on, where n is 128, it is infinite. NaN stays NaN.
static inline f32x16 exp16(f32x16 x) {
    x = x < -87.f ? (f32x16){} - 87.f : x;
    x = x > 89.f ? (f32x16){} + 89.f : x;  // more would run over into the bit of the sign
    i32x16 n = __builtin_convertvector(x * 1.44269504f + (x < 0.f ? (f32x16){} - 0.5f : (f32x16){} + 0.5f), i32x16);
    f32x16 whole = __builtin_convertvector(n, f32x16);
    f32x16 r = IN_ORDER(x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    f32x16 y = 4.1666667e-2f + r * (8.3333333e-3f + r * 1.3888889e-3f);
    y = 1 + r * (1 + r * (0.5f + r * (1.6666667e-1f + r * y)));
    i32x16 power = (n + 127) << 23;
    return y * (f32x16)power;
}

template <class Out, class In>
static void rms_norm(Out* y, const In* x, const float* weight, int64_t n, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < n; i++) squares += to_float(x[i]) * to_float(x[i]);
    float scale = 1 / sqrtf(squares / n + eps);
    for (int64_t i = 0; i < n; i++) store(y + i, to_float(x[i]) * scale * weight[i]);
}

static void rotate(float* x, const float* cos, const float* sin, int64_t D) {  // pairs (x_i, x_{i+D/2})
    for (int64_t i = 0; i < D / 2; i++) {
        float a = x[i], b = x[i + D / 2];
        x[i] = a * cos[i] - b * sin[i];
        x[i + D / 2] = b * cos[i + D / 2] + a * sin[i + D / 2];
    }
}

// A head of q or k: normed if the model has a weight for that, then turned to its position.
template <class In>
static void place_head(float* y, const In* x, const float* weight, const float* cos, const float* sin, int64_t D, float eps) {
    if (weight) {
        rms_norm(y, x, weight, D, eps);
    } else {
        for (int64_t i = 0; i < D; i++) y[i] = to_float(x[i]);
    }
    rotate(y, cos, sin, D);
}

// --- where the time goes -----------------------------------------------------------------------------------------------

enum Part { QKV, ATTENTION, O, MLP, HEAD, BETWEEN };  // of a decode step; BETWEEN: norms, rotation and gates of a prefill
extern thread_local double spent[6];  // seconds of the calling thread, added up until somebody sets them to 0

struct Timer {
    double* to;
    std::chrono::steady_clock::time_point began;
    Timer(Part part) : to(&spent[part]), began(std::chrono::steady_clock::now()) {}
    ~Timer() { *to += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count(); }
};
