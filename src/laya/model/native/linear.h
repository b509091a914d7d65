/* Products of activations with matrices held in 4 or 8 bits. Blocks of 64 matrix rows, so that threads share a matrix. */
#ifndef LAYA_LINEAR_H
#define LAYA_LINEAR_H

#include <stdint.h>

#define BLOCK_ROWS 64 /* torch's packed layout of 4-bit weights interleaves so many */

/* Rows that stand side by side in one form. bits 4: `weights` in torch's AVX-512 layout, `scales` bf16 pairs (scale, zero)
 * [columns / group][rows]. bits 8: int8 [rows][columns], `scales` float32 [rows], `sums` int32 [rows] of each row's weights. */
typedef struct {
    int32_t bits, rows, group, pad;
    const void *weights, *scales;
    const int32_t *sums;
} Part;

typedef struct {
    int32_t rows, columns, parts, pad;
    Part part[3];
} Linear;

/* Inputs of a product: `x` float32 [rows][stride]; sums of each group of 32 columns for 4-bit parts; two unsigned bytes a number
 * and each row's step for 8-bit parts: x = (256 * high + low - 16384) * step. */
typedef struct {
    const float *x;
    int64_t stride;
    float *sums;
    uint8_t *high, *low;
    float *steps;
    int64_t sums_stride, planes_stride;
} Input;

#define SUM_COLUMNS 32

void input_row(const Input *input, int64_t row, int64_t columns, int four, int eight);
int has_bits(const Linear *linear, int bits);

/* out[row][0..64) of matrix rows [64 * block, ...), for `count` input rows; `out` is [count][64]. */
void linear_block(const Linear *linear, int64_t block, const Input *input, int64_t count, float *out);

#endif
