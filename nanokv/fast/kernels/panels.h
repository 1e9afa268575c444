// Blocks with many rows of activations: 32 rows of weights, one per lane, with four rows of
// activations at a time. Weights are decoded once for all activations.
//
// Four products of bytes are added in an instruction (VNNI), and the sum of a group is multiplied
// with the scales of both sides. Products of bf16 would be half as many in an instruction.

#pragma once
#include "blocks.h"
#include "tiles.h"

#if defined(WIDE_PRODUCTS)

// 32 inputs of four rows of activations in 8 bits: x ≈ code · scale.
struct Quad {
    int8_t code[4][GROUP];
    float scale[4], offset[4];  // offset: scale · sum of the codes
    int32_t sum[2][4];          // of each 16 codes
};

// A unit of 16 rows of blocks, one row per lane.
template <class B>
struct alignas(64) Panel {
    __m512i code[B::UNIT / 4];  // of 4 adjacent inputs
    __m512 all[16];
    void fill(const uint8_t* p, int64_t row, int64_t count) {  // row: bytes from one row to the next
        const int STEPS = B::UNIT / 64;
        __m512 turned[STEPS + 1][16];
        for (int r = 0; r < 16; r++) {
            typename B::Unit unit(p + r * row, count);
            for (int i = 0; i < STEPS; i++) turned[i][r] = (__m512)unit.codes(i);
            turned[STEPS][r] = unit.all;
        }
        for (auto& block : turned) turn16(block);
        for (int i = 0; i < 4 * STEPS; i++)
            for (int j = 0; j < 4; j++) code[4 * B::chunk(i) + j] = (__m512i)turned[i / 4][i % 4 * 4 + j];
        for (int lane = 0; lane < 16; lane++) all[lane] = turned[STEPS][lane];
    }
};

// sums[h][m] += 16 rows of w[h] · row m of x, over a unit.
template <class B>
static inline void add_panels(const Panel<B>* w, const Quad* x, __m512 (*sums)[4]) {
    const int PART = GROUP / B::SCALES / 4;  // lines with one scale
    for (int i = 0; i < B::UNIT / GROUP * B::SCALES; i++) {
        int g = i / B::SCALES, half = i % B::SCALES;
        __m512i products[2][4];
        for (int m = 0; m < 4; m++) {
            int32_t sum = B::SCALES == 2 ? x[g].sum[half][m] : x[g].sum[0][m] + x[g].sum[1][m];
            products[0][m] = products[1][m] = _mm512_set1_epi32(-B::ZERO * sum);
        }
#pragma GCC unroll 8
        for (int k = 0; k < PART; k++)
#pragma GCC unroll 4
            for (int m = 0; m < 4; m++) {
                int32_t four;
                memcpy(&four, x[g].code[m] + 4 * (half * PART + k), 4);
                for (int h = 0; h < 2; h++)
                    products[h][m] = _mm512_dpbusd_epi32(products[h][m], w[h].code[i * PART + k], _mm512_set1_epi32(four));
            }
#pragma GCC unroll 4
        for (int m = 0; m < 4; m++)
            for (int h = 0; h < 2; h++) {
                __m512 scale = w[h].all[B::scale_at(g, half)] * x[g].scale[m];
                sums[h][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[h][m]), scale, sums[h][m]);
                if (B::LEAST) sums[h][m] += w[h].all[B::least_at(g)] * (B::LEAST * x[g].offset[m]);
            }
    }
}
#endif
