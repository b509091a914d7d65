/* 4-bit products keep float32 activations, weights and sums; 8-bit ones are exact integer sums of 15-bit activations.
 * A row's numbers are the same to the bit whatever rows are computed beside it: every tile adds in the same order. */
#include "linear.h"
#include "vectors.h"

#define VECTORS (BLOCK_ROWS / LANES)
#define HALF (BLOCK_ROWS / 2)
#define TILE_ROWS 6 /* with four vectors of weights: 24 sums, 29 of 32 registers */
/* Bytes of weights asked for before they are needed: of 512 to 16384 the best at one row, a third faster than 512. */
#define AHEAD 4096

/* Four vectors of 4-bit numbers less 8: a byte has row r in its low half and row r + 32 in its high one. */
INLINE void unpack(const uint8_t *bytes, __m512 table, __m512 w[VECTORS]) {
    __m512i a = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
    __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(bytes + LANES)));
    w[0] = _mm512_permutexvar_ps(a, table);
    w[1] = _mm512_permutexvar_ps(b, table);
    w[2] = _mm512_permutexvar_ps(_mm512_srli_epi32(a, 4), table);
    w[3] = _mm512_permutexvar_ps(_mm512_srli_epi32(b, 4), table);
}

/* A group's columns into `total` [rows][64]: total += scale * sum((q - 8) * x) + zero * sum(x). */
INLINE void tile(int rows, const uint8_t *packed, const float *panel, const uint32_t *pairs, int columns, const float *x,
                 int64_t stride, const float *sums, int64_t sums_stride, __m512 table, float *total) {
    __m512 acc[TILE_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) acc[m][v] = _mm512_setzero_ps();
    for (int k = 0; k < columns; k++) {
        __m512 w[VECTORS];
        if (panel) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) w[v] = _mm512_load_ps(panel + k * BLOCK_ROWS + v * LANES);
        } else {
            if (!(k & 1)) _mm_prefetch((const char *)packed + k * HALF + AHEAD, _MM_HINT_T0);
            unpack(packed + k * HALF, table, w);
        }
#pragma GCC unroll 6
        for (int m = 0; m < rows; m++) {
            __m512 number = _mm512_set1_ps(x[m * stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) acc[m][v] = _mm512_fmadd_ps(w[v], number, acc[m][v]);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        __m512i pair = _mm512_loadu_si512(pairs + v * LANES);
        __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
        __m512 zero = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000u)));
#pragma GCC unroll 6
        for (int m = 0; m < rows; m++) {
            float *at = total + m * BLOCK_ROWS + v * LANES;
            __m512 sum = _mm512_fmadd_ps(scale, acc[m][v], _mm512_loadu_ps(at));
            _mm512_storeu_ps(at, _mm512_fmadd_ps(zero, _mm512_set1_ps(sums[m * sums_stride]), sum));
        }
    }
}

static void tiles(int64_t count, const uint8_t *packed, const float *panel, const uint32_t *pairs, int columns, const float *x,
                  int64_t stride, const float *sums, int64_t sums_stride, __m512 table, float *total) {
    while (count > 0) {
        int64_t rows = count <= TILE_ROWS ? count : count < 2 * TILE_ROWS ? (count + 1) / 2 : TILE_ROWS;
        switch (rows) {
#define CASE(n) \
    case n: tile(n, packed, panel, pairs, columns, x, stride, sums, sums_stride, table, total); break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
        }
        count -= rows, x += rows * stride, sums += rows * sums_stride, total += rows * BLOCK_ROWS;
    }
}

static void four_bits(const Part *part, int64_t columns, int64_t block, const Input *input, int64_t count, float *out) {
    const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const uint8_t *packed = (const uint8_t *)part->weights + block * columns * HALF;
    const uint32_t *pairs = (const uint32_t *)part->scales + block * BLOCK_ROWS;
    float panel[SUM_COLUMNS * BLOCK_ROWS] __attribute__((aligned(64)));
    for (int64_t i = 0; i < count * BLOCK_ROWS; i += LANES) _mm512_storeu_ps(out + i, _mm512_setzero_ps());
    /* Groups wider than 32 columns are added up 32 at a time, each with the group's own scale. */
    for (int64_t first = 0; first < columns; first += SUM_COLUMNS, packed += SUM_COLUMNS * HALF) {
        const uint32_t *pair = pairs + first / part->group * part->rows;
        const float *unpacked = 0;
        if (count > TILE_ROWS) {
            for (int k = 0; k < SUM_COLUMNS; k++) {
                __m512 w[VECTORS];
                if (!(k & 1)) _mm_prefetch((const char *)packed + k * HALF + AHEAD, _MM_HINT_T0);
                unpack(packed + k * HALF, table, w);
                for (int v = 0; v < VECTORS; v++) _mm512_store_ps(panel + k * BLOCK_ROWS + v * LANES, w[v]);
            }
            unpacked = panel;
        }
        tiles(count, packed, unpacked, pair, SUM_COLUMNS, input->x + first, input->stride, input->sums + first / SUM_COLUMNS,
              input->sums_stride, table, out);
    }
}

#define WEIGHT_ROWS 2 /* of an 8-bit tile */
#define INPUT_ROWS 4

/* `inputs` rows times WEIGHT_ROWS weight rows: integer sums, then one rounding. */
INLINE void bytes_tile(int inputs, int wide, const int8_t *weights, int64_t columns, const Input *input, int64_t row,
                       const float *scales, const int32_t *sums, float *out) {
    __m512i high[INPUT_ROWS][WEIGHT_ROWS], low[INPUT_ROWS][WEIGHT_ROWS];
    for (int m = 0; m < inputs; m++)
        for (int n = 0; n < wide; n++) high[m][n] = low[m][n] = _mm512_setzero_si512();
    for (int64_t k = 0; k < columns; k += 64) {
        __mmask64 there = columns - k >= 64 ? ~0ull : (1ull << (columns - k)) - 1;
        __m512i w[WEIGHT_ROWS];
#pragma GCC unroll 2
        for (int n = 0; n < wide; n++) {
            _mm_prefetch((const char *)weights + n * columns + k + AHEAD, _MM_HINT_T0);
            w[n] = _mm512_maskz_loadu_epi8(there, weights + n * columns + k);
        }
#pragma GCC unroll 4
        for (int m = 0; m < inputs; m++) {
            __m512i a = _mm512_loadu_si512(input->high + (row + m) * input->planes_stride + k);
            __m512i b = _mm512_loadu_si512(input->low + (row + m) * input->planes_stride + k);
#pragma GCC unroll 2
            for (int n = 0; n < wide; n++) {
                high[m][n] = _mm512_dpbusd_epi32(high[m][n], a, w[n]);
                low[m][n] = _mm512_dpbusd_epi32(low[m][n], b, w[n]);
            }
        }
    }
    for (int m = 0; m < inputs; m++)
        for (int n = 0; n < wide; n++) {
            int64_t sum = 256 * (int64_t)_mm512_reduce_add_epi32(high[m][n]) + _mm512_reduce_add_epi32(low[m][n]);
            sum -= 16384 * (int64_t)sums[n];
            out[(row + m) * BLOCK_ROWS + n] = (float)sum * scales[n] * input->steps[row + m];
        }
}

static void eight_bits(const Part *part, int64_t columns, int64_t block, const Input *input, int64_t count, float *out) {
    int64_t first = block * BLOCK_ROWS, last = first + BLOCK_ROWS < part->rows ? first + BLOCK_ROWS : part->rows;
    for (int64_t n = first; n < last; n += WEIGHT_ROWS) {
        const int8_t *weights = (const int8_t *)part->weights + n * columns;
        const float *scales = (const float *)part->scales + n;
        int wide = last - n >= WEIGHT_ROWS ? WEIGHT_ROWS : 1;
        for (int64_t row = 0; row < count;) {
            float *at = out + n - first;
            int64_t left = count - row;
            if (wide == 1) {
                bytes_tile(1, 1, weights, columns, input, row, scales, part->sums + n, at), row += 1;
            } else if (left >= 4) {
                bytes_tile(4, WEIGHT_ROWS, weights, columns, input, row, scales, part->sums + n, at), row += 4;
            } else if (left >= 2) {
                bytes_tile(2, WEIGHT_ROWS, weights, columns, input, row, scales, part->sums + n, at), row += 2;
            } else {
                bytes_tile(1, WEIGHT_ROWS, weights, columns, input, row, scales, part->sums + n, at), row += 1;
            }
        }
    }
}

void linear_block(const Linear *linear, int64_t block, const Input *input, int64_t count, float *out) {
    const Part *part = linear->part;
    for (; block * BLOCK_ROWS >= part->rows; part++) block -= part->rows / BLOCK_ROWS;
    if (part->bits == 4)
        four_bits(part, linear->columns, block, input, count, out);
    else
        eight_bits(part, linear->columns, block, input, count, out);
}

int has_bits(const Linear *linear, int bits) {
    for (int i = 0; i < linear->parts; i++)
        if (linear->part[i].bits == bits) return 1;
    return 0;
}

static void planes(const Input *input, int64_t row, int64_t columns) {
    const float *x = input->x + row * input->stride;
    __m512 peak = _mm512_setzero_ps(), sound = _mm512_setzero_ps();
    for (int64_t k = 0; k < columns; k += LANES) {
        __mmask16 there = columns - k >= LANES ? 0xffff : (__mmask16)((1u << (columns - k)) - 1);
        __m512 number = _mm512_maskz_loadu_ps(there, x + k);
        peak = _mm512_max_ps(peak, _mm512_abs_ps(number));
        sound = _mm512_fmadd_ps(number, _mm512_setzero_ps(), sound); /* a number that is not finite makes it NaN */
    }
    float largest = _mm512_reduce_max_ps(peak);
    float step = (largest > 1e-37f ? largest : 1e-37f) / 16256.0f;
    __m512 inverse = _mm512_set1_ps(1.0f / step);
    input->steps[row] = step + _mm512_reduce_add_ps(sound);
    uint8_t *high = input->high + row * input->planes_stride, *low = input->low + row * input->planes_stride;
    for (int64_t k = 0; k < input->planes_stride; k += LANES) {
        __mmask16 there = columns - k >= LANES ? 0xffff : columns > k ? (__mmask16)((1u << (columns - k)) - 1) : 0;
        __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(there, x + k), inverse));
        number = _mm512_maskz_add_epi32(there, number, _mm512_set1_epi32(16384));
        _mm_storeu_si128((__m128i *)(high + k), _mm512_cvtepi32_epi8(_mm512_srli_epi32(number, 8)));
        _mm_storeu_si128((__m128i *)(low + k), _mm512_cvtepi32_epi8(number));
    }
}

void input_row(const Input *input, int64_t row, int64_t columns, int four, int eight) {
    const float *x = input->x + row * input->stride;
    if (four)
        for (int64_t k = 0; k < columns; k += SUM_COLUMNS)
            input->sums[row * input->sums_stride + k / SUM_COLUMNS] =
                _mm512_reduce_add_ps(_mm512_add_ps(_mm512_loadu_ps(x + k), _mm512_loadu_ps(x + k + LANES)));
    if (eight) planes(input, row, columns);
}
