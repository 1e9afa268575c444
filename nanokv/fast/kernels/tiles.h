// Matrix tiles (Intel's AMX): one instruction adds the product of a (16,32) and a (32,16) matrix of
// bf16 to sums in fp32.
//
// A tile is 16 rows of 64 bytes, and a thread has eight tiles, 0 … 7. tile_dot_bf16(c, a, b) is
// C += A · B:
//
//     A   16 rows of 32 bf16, in the order of the matrix
//     B   row j holds inputs 2j and 2j+1 of 16 columns side by side, as pack_pairs writes them
//     C   16 rows of 16 fp32
//
// With -DNANOKV_TILES=emulated the instructions are replaced by functions, so that any processor
// with AVX-512 can test the code.

#pragma once
#include "vectors.h"
#if defined(__AVX512BF16__) && defined(NANOKV_TILES)
#define TILES "emulated tiles"
#elif defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__)
#define TILES "tiles"
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512F__)
static inline __m512 pairs16(const bf16* p) { return _mm512_loadu_ps(p); }
#if defined(__AVX512BF16__)
static inline __m512 pairs16(const float* p) {
    return (__m512)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(p + 16), _mm512_loadu_ps(p));
}
#endif
#endif

// x (rows,K) with up to 16 rows → pairs of adjacent inputs of 16 rows as bf16, K / 2 · 16 pairs.
// Missing rows are zeros. K is even, and a multiple of 32 if x is fp32.
template <class T>
static inline void pack_pairs(const T* x, int64_t rows, int64_t K, uint32_t* pairs) {
    int64_t k = 0;
#if defined(__AVX512F__)
    for (; k + 32 <= K; k += 32) {
        __m512 v[16];
        for (int i = 0; i < 16; i++) v[i] = i < rows ? pairs16(x + i * K + k) : _mm512_setzero_ps();
        turn16(v);
        for (int i = 0; i < 16; i++) _mm512_storeu_ps(pairs + (k / 2 + i) * 16, v[i]);
    }
#endif
    for (; k < K; k += 2)
        for (int64_t i = 0; i < 16; i++) {
            uint32_t two = 0;
            if (i < rows) memcpy(&two, x + i * K + k, 4);
            pairs[k / 2 * 16 + i] = two;
        }
}

// One cache line. A row of a tile is loaded at once if it lies in one line.
struct alignas(64) Line { bf16 values[32]; };

#if defined(TILES) && !defined(NANOKV_TILES)

// The number of a tile is part of the instruction and must be a literal. The compiler's
// _tile_loadd is not used, because in GCC 12 it does not declare that it reads memory: an earlier
// write to that memory could be moved behind it.
#define tile_load(t, from, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"((const void*)(from)), "r"((int64_t)(stride)) : "memory")
#define tile_store(t, to, stride) \
    asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"((void*)(to)), "r"((int64_t)(stride)) : "memory")
#define tile_zero(t) asm volatile("tilezero %%tmm" #t : :)
#define tile_dot_bf16(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)

// Linux lets a process use tiles, which take 8 KiB per thread, only on request.
inline bool tiles_allowed() {
    const long request = 0x1023 /* ARCH_REQ_XCOMP_PERM */, tile_data = 18 /* XFEATURE_XTILEDATA */;
    static const bool allowed = syscall(SYS_arch_prctl, request, tile_data) == 0;
    return allowed;
}

// The thread that constructs this may use tiles until it is destroyed. torch configures its own
// tiles afterwards.
struct Tiles {
    Tiles() {
        struct alignas(64) {
            uint8_t palette = 1, unused[15] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } form;
        for (int t = 0; t < 8; t++) form.bytes[t] = 64, form.rows[t] = 16;
        if (tiles_allowed()) asm volatile("ldtilecfg %0" : : "m"(form));
    }
    ~Tiles() {
        if (tiles_allowed()) asm volatile("tilerelease" : :);
    }
};

#elif defined(TILES)

static thread_local struct { uint8_t row[16][64]; } tile[8];

static inline bool tiles_allowed() { return true; }
struct Tiles {
    Tiles() { memset(tile, 0, sizeof(tile)); }
    ~Tiles() { memset(tile, 0xff, sizeof(tile)); }  // NaN, so that a later use is noticed
};
static inline void tile_zero(int t) { memset(tile[t].row, 0, sizeof(tile[t].row)); }
static inline void tile_load(int t, const void* from, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy(tile[t].row[r], (const char*)from + r * stride, 64);
}
static inline void tile_store(int t, void* to, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy((char*)to + r * stride, tile[t].row[r], 64);
}
// The instruction treats denormals as zero, in inputs and results.
static inline float flushed(float x) { return fabsf(x) < FLT_MIN ? 0 : x; }

// TDPBF16PS as in Intel's manual: for each value of C one sum of the even inputs and one of the odd
// inputs, in ascending order by fused multiply-adds, rounded to nearest even. Then the odd sum is
// added to the even sum, and the total to C.
static void tile_dot_bf16(int c, int a, int b) {
    float A[16][32], B[16][32], C[16][16];
    for (int r = 0; r < 16; r++)
        for (int i = 0; i < 32; i++) {
            bf16 x, y;
            memcpy(&x, &tile[a].row[r][2 * i], 2), memcpy(&y, &tile[b].row[r][2 * i], 2);
            A[r][i] = flushed(to_float(x)), B[r][i] = flushed(to_float(y));
        }
    memcpy(C, tile[c].row, sizeof(C));
    for (int m = 0; m < 16; m++) {
        float sum[32] = {};
        for (int k = 0; k < 16; k++)
            for (int i = 0; i < 32; i++) sum[i] = flushed(fmaf(A[m][2 * k + i % 2], B[k][i], sum[i]));
        for (int n = 0; n < 16; n++) C[m][n] = flushed(flushed(C[m][n]) + flushed(sum[2 * n] + sum[2 * n + 1]));
    }
    memcpy(tile[c].row, C, sizeof(C));
}

#else

static inline bool tiles_allowed() { return false; }
struct Tiles {};

#endif
