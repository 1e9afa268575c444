// Numbers and vectors that the kernels share: bf16, vectors of sixteen floats, and their
// operations.
//
// The vectors are the portable vector types of GCC and clang, as wide as the machine's registers.
// Sixteen floats are one vector, two halves or four quarters. (GCC keeps a type that is wider
// than a register in memory, which is 6 times slower.) Intrinsics are used only for instructions
// that compilers do not generate from portable code.

#pragma once
#include <cfloat>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

typedef float   f32x4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint8_t u8x16 __attribute__((vector_size(16), aligned(1), may_alias));

#if defined(__AVX512F__)
const int LANES = 16;
#elif defined(__AVX2__)
const int LANES = 8;
#else
const int LANES = 4;
#endif
typedef float    floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t  ints   __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words  __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// A template argument loses the attributes `aligned` and `may_alias`, so memory is accessed only
// through load16 and store16.
template <class V>
struct Twice { V low, high; };
#define ON_BOTH(op) \
    template <class V> static inline Twice<V> operator op(Twice<V> a, Twice<V> b) { return {a.low op b.low, a.high op b.high}; } \
    template <class V> static inline Twice<V> operator op(Twice<V> a, float b) { return {a.low op b, a.high op b}; } \
    template <class V> static inline Twice<V> operator op(float a, Twice<V> b) { return {a op b.low, a op b.high}; }
ON_BOTH(+)
ON_BOTH(-)
ON_BOTH(*)
ON_BOTH(/)
template <class V> static inline Twice<V> operator-(Twice<V> a) { return {-a.low, -a.high}; }
template <class V> static inline void operator+=(Twice<V>& a, Twice<V> b) { a = a + b; }

#if defined(__AVX512F__)
typedef floats f32x16;
#elif defined(__AVX2__)
typedef Twice<floats> f32x16;
#else
typedef Twice<Twice<floats>> f32x16;
#endif

inline int threads() {
#if defined(_OPENMP)
    return omp_get_max_threads();
#else
    return 1;
#endif
}

struct bf16 { uint16_t bits; };  // the upper half of a float

enum Format { FP32, BF16, INT8, INT4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };
const int64_t WORTH = 1 << 18;  // bytes, or as much arithmetic, that are worth several threads
const int64_t MANY = 1 << 14;  // activations from which on work per row is divided among threads
const int GROUP = 32;  // inputs that share a scale: activations for all codes, weights for int4

// --- numbers -------------------------------------------------------------------------------------

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
static inline void load(floats& v, const float* p) { v = *(const floats*)p; }
static inline void load(floats& v, const bf16* p) {
#if defined(__AVX512F__)  // GCC 12 needs several instructions for the portable form
    words wide = (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16;
#elif defined(__AVX2__)
    words wide = (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16;
#else  // interleave zeros and values; __builtin_convertvector would convert them one by one
    typedef uint16_t eight __attribute__((vector_size(16)));
    eight zeros = {}, values = {};
    memcpy(&values, p, 2 * LANES);
#if defined(__clang__)
    words wide = (words)__builtin_shufflevector(zeros, values, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    words wide = (words)__builtin_shuffle(zeros, values, (eight){0, 8, 1, 9, 2, 10, 3, 11});
#endif
#endif
    v = (floats)wide;
}
static inline void load(floats& v, const int8_t* p) {
#if defined(__AVX512F__)
    v = (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    v = (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    for (int i = 0; i < LANES; i++) v[i] = p[i];
#endif
}
template <class V, class T>
static inline void load(Twice<V>& v, const T* p) {
    load(v.low, p);
    load(v.high, p + sizeof(V) / sizeof(float));
}
template <class T>
static inline f32x16 load16(const T* p) {
    f32x16 v;
    load(v, p);
    return v;
}
static inline void store16(float* p, floats v) { *(floats*)p = v; }
template <class V>
static inline void store16(float* p, Twice<V> v) {
    store16(p, v.low);
    store16(p + sizeof(V) / sizeof(float), v.high);
}
static inline void store16(bf16* p, f32x16 v) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &half, 32);
#else
    float each[16];
    store16(each, v);
    for (int i = 0; i < 16; i++) store(p + i, each[i]);
#endif
}
static inline float sum16(floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s = 0;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
#endif
}
template <class V>
static inline float sum16(Twice<V> v) { return sum16(v.low + v.high); }

static inline floats abs16(floats v) { return v < 0.f ? -v : v; }
static inline floats max16(floats a, floats b) { return a > b ? a : b; }
static inline float max16(floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}
static inline bool finite16(floats v) {  // not by v − v, which -fassociative-math folds to 0
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)abs16(v), _mm512_set1_ps(FLT_MAX), _CMP_LE_OQ) == 0xffff;
#else
    bool finite = true;
    for (int i = 0; i < LANES; i++) finite &= fabsf(v[i]) <= FLT_MAX;
    return finite;
#endif
}
// Round to nearest, ties to even → the sum of the codes.
static inline int round16(floats v, int8_t* to) {
#if defined(__AVX512F__)
    __m512i codes = _mm512_cvtps_epi32((__m512)v);
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(codes));
    return _mm512_reduce_add_epi32(codes);
#else
    int sum = 0;
    for (int i = 0; i < LANES; i++) sum += to[i] = (int8_t)nearbyintf(v[i]);
    return sum;
#endif
}
template <class V>
static inline Twice<V> abs16(Twice<V> v) { return {abs16(v.low), abs16(v.high)}; }
template <class V>
static inline Twice<V> max16(Twice<V> a, Twice<V> b) { return {max16(a.low, b.low), max16(a.high, b.high)}; }
template <class V>
static inline float max16(Twice<V> v) { return max16(max16(v.low, v.high)); }
template <class V>
static inline bool finite16(Twice<V> v) { return finite16(v.low) && finite16(v.high); }
template <class V>
static inline int round16(Twice<V> v, int8_t* to) {
    return round16(v.low, to) + round16(v.high, to + sizeof(V) / sizeof(float));
}

// The sums of sixteen vectors at once: 45 instructions instead of 200.
static inline f32x16 sums16(const f32x16* v) {
#if defined(__AVX512F__)
    __m512 two[8], four[4], half[2];
    __m512 s[16];  // not a cast of v, which need not be aligned
    for (int i = 0; i < 16; i++) s[i] = (__m512)v[i];
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
    float sums[16];
    for (int i = 0; i < 16; i++) sums[i] = sum16(v[i]);
    return load16(sums);
#endif
}

#if defined(__AVX512F__)
// The sums of four vectors, added in the order of sums16: the same bits.
static inline __m128 sums4(const __m512* s) {
    __m512 two = _mm512_unpacklo_ps(s[0], s[1]) + _mm512_unpackhi_ps(s[0], s[1]);
    __m512 more = _mm512_unpacklo_ps(s[2], s[3]) + _mm512_unpackhi_ps(s[2], s[3]);
    __m512 four = (__m512)_mm512_unpacklo_pd((__m512d)two, (__m512d)more) +
                  (__m512)_mm512_unpackhi_pd((__m512d)two, (__m512d)more);
    __m512 half = four + _mm512_shuffle_f32x4(four, four, 0xb1);
    return _mm512_castps512_ps128(half + _mm512_shuffle_f32x4(half, half, 0x4e));
}

// Transpose a block of 16 × 16 in 64 instructions.
static inline void turn16(__m512* v) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) a[i] = _mm512_unpacklo_ps(v[i], v[i + 1]), a[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            __m512d low = (__m512d)a[i + j], high = (__m512d)a[i + 2 + j];
            b[i + 2 * j] = (__m512)_mm512_unpacklo_pd(low, high);
            b[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(low, high);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            a[i + j] = _mm512_shuffle_f32x4(b[i + j], b[i + 4 + j], 0x88);
            a[i + 4 + j] = _mm512_shuffle_f32x4(b[i + j], b[i + 4 + j], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        v[j] = _mm512_shuffle_f32x4(a[j], a[8 + j], 0x88);
        v[8 + j] = _mm512_shuffle_f32x4(a[j], a[8 + j], 0xdd);
    }
}
#endif

// Evaluates its argument as one unit, although -fassociative-math allows sums in any order.
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

// The value itself, rounded before anything is added to it: no multiply-add takes it up.
static inline floats apart(floats v) { return IN_ORDER(v); }
template <class V>
static inline Twice<V> apart(Twice<V> v) { return {apart(v.low), apart(v.high)}; }

// e^x with an error of 2.6e-7: 2^n · e^r with |r| ≤ ln(2)/2 and e^r by its series. n·ln(2) is
// subtracted in two parts. The first part of ln(2) has so few bits that its product with n is
// exact; with both parts in one number the error would be 4e-6. Below −87 the result is e^−87 =
// 1.6e-38. From 88.4 on, where n is 128, it is infinite. NaN stays NaN.
static inline floats exp16(floats x) {
    x = x < -87.f ? (floats){} - 87.f : x;
    x = x > 89.f ? (floats){} + 89.f : x;  // a larger n would overflow into the sign bit
    ints n = __builtin_convertvector(x * 1.44269504f + (x < 0.f ? (floats){} - 0.5f : (floats){} + 0.5f), ints);
    floats whole = __builtin_convertvector(n, floats);
    floats r = IN_ORDER(x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    floats y = 4.1666667e-2f + r * (8.3333333e-3f + r * 1.3888889e-3f);
    y = 1 + r * (1 + r * (0.5f + r * (1.6666667e-1f + r * y)));
    ints power = (n + 127) << 23;
    return y * (floats)power;
}
template <class V>
static inline Twice<V> exp16(Twice<V> x) { return {exp16(x.low), exp16(x.high)}; }

template <class Out, class In>
static void rms_norm(Out* y, const In* x, const float* weight, int64_t n, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < n; i++) squares += to_float(x[i]) * to_float(x[i]);
    float scale = 1 / sqrtf(squares / n + eps);
    for (int64_t i = 0; i < n; i++) store(y + i, to_float(x[i]) * scale * weight[i]);
}

// Rotate the pairs (x_i, x_{i+D/2}).
static void rotate(float* x, const float* cos, const float* sin, int64_t D) {
    for (int64_t i = 0; i < D / 2; i++) {
        float a = x[i], b = x[i + D / 2];
        x[i] = a * cos[i] - b * sin[i];
        x[i + D / 2] = b * cos[i + D / 2] + a * sin[i + D / 2];
    }
}

// A head of q or k: normed if the model has a weight for it, then rotated.
template <class In>
static void place_head(float* y, const In* x, const float* weight, const float* cos, const float* sin, int64_t D, float eps) {
    if (weight) {
        rms_norm(y, x, weight, D, eps);
    } else {
        for (int64_t i = 0; i < D; i++) y[i] = to_float(x[i]);
    }
    rotate(y, cos, sin, D);
}

// --- time measurement ----------------------------------------------------------------------------

// The parts of a decode step; BETWEEN: norms, rotation and gates of a prefill.
enum Part { QKV, ATTENTION, O, MLP, HEAD, BETWEEN };
extern thread_local double spent[6];  // seconds of this thread per part; the caller resets them

struct Timer {
    double* to;
    std::chrono::steady_clock::time_point began;
    Timer(Part part) : to(&spent[part]), began(std::chrono::steady_clock::now()) {}
    ~Timer() { *to += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count(); }
};
