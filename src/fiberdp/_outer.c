/* Per-example gradients Sum_s L_s R_s^T, for engines/parts.py: their squared norms from the factors alone (gram), or themselves and their
   squared norms in one go (dense).  This file is included once for each type. */

#ifdef _OPENMP
#ifndef T

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
enum { BYTES = 64, HIGH = 4, WIDE = 4, ROWS = 12 };
#elif defined(__AVX__)
enum { BYTES = 32, HIGH = 4, WIDE = 3, ROWS = 6 };
#else
enum { BYTES = 16, HIGH = 4, WIDE = 3, ROWS = 6 };
#endif
enum { TILE = HIGH * WIDE, CHUNK = 2048, PANEL_BYTES = 1 << 18 };  /* of gram */
enum { DEPTH = 256, PANEL = 192 };                                 /* of dense; ROWS divides PANEL */

#define UNROLL _Pragma("GCC unroll 16")
#ifdef __x86_64__
#define IN_A_REGISTER(x) __asm__("" : "+v"(x))  /* else it is loaded again for every product */
#else
#define IN_A_REGISTER(x)
#endif

#define T float
#define LANE int32_t
#define NAME(x) x##_float
#include "_outer.c"
#undef T
#undef LANE
#undef NAME
#define T double
#define LANE int64_t
#define NAME(x) x##_double
#include "_outer.c"

#else

enum { NAME(LANES) = BYTES / sizeof(T) };
typedef T NAME(vector) __attribute__((vector_size(BYTES)));
typedef T NAME(unaligned) __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
typedef LANE NAME(mask) __attribute__((vector_size(BYTES)));

/* ---- gram: rows are multiplied HIGH x WIDE at a time, in as many registers of partial sums, first those of the left factors, then those of
   the right; the two tiles of products meet in registers and only the sum over them is kept, in double.  At most CHUNK entries are summed in
   the factors' own type, in as many partial sums as a register has lanes; two lanes, and chunks, are added in double.  Of a factor with
   itself only the products on and below the diagonal are formed. */

/* sums[i WIDE + j] = partial sums of rows[i] . columns[j] over `steps` registers.  Apart, so that all of them stay in registers. */
static __attribute__((noinline)) void NAME(accumulate)(const T *const rows[HIGH], const T *const columns[WIDE], int64_t at, int64_t steps,
                                                       NAME(vector) *sums) {
    NAME(vector) held[TILE] = {{0}};
    const T *r[HIGH], *c[WIDE];
    UNROLL for (int i = 0; i < HIGH; i++) r[i] = rows[i] + at;
    UNROLL for (int j = 0; j < WIDE; j++) c[j] = columns[j] + at;
    for (int64_t k = 0; k < steps * NAME(LANES); k += NAME(LANES)) {
        NAME(vector) row, column[WIDE];
        UNROLL for (int j = 0; j < WIDE; j++) {
            column[j] = *(const NAME(unaligned) *)(c[j] + k);
            IN_A_REGISTER(column[j]);
        }
        UNROLL for (int i = 0; i < HIGH; i++) {
            row = *(const NAME(unaligned) *)(r[i] + k);
            IN_A_REGISTER(row);
            UNROLL for (int j = 0; j < WIDE; j++) held[i * WIDE + j] += row * column[j];
        }
    }
    UNROLL for (int x = 0; x < TILE; x++) sums[x] = held[x];
}

/* out[i WIDE + j] = rows[i] . columns[j], each of n entries. */
static void NAME(dots)(const T *const rows[HIGH], const T *const columns[WIDE], int64_t n, double out[TILE]) {
    enum { W = NAME(LANES) };
    for (int x = 0; x < TILE; x++) out[x] = 0;
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t stop = n - start < CHUNK ? n : start + CHUNK;
        NAME(vector) sums[TILE];
        NAME(accumulate)(rows, columns, start, (stop - start) / W, sums);
        /* Two registers of W / length sums, `length` lanes each, become one with half as many lanes a sum. */
        UNROLL for (int length = W; length > 2; length /= 2) {
            NAME(mask) low, high;
            UNROLL for (int lane = 0; lane < W; lane++) {
                int half = length / 2, sum = lane / half, each = W / length;
                low[lane] = sum / each * W + sum % each * length + lane % half;
                high[lane] = low[lane] + half;
            }
            UNROLL for (int x = 0; x < TILE * length / W / 2; x++) {
                NAME(vector) a = sums[2 * x], b = sums[2 * x + 1];
                sums[x] = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
            }
        }
        UNROLL for (int x = 0; x < TILE; x++) out[x] += (double)sums[2 * x / W][2 * x % W] + (double)sums[2 * x / W][2 * x % W + 1];
        for (int64_t k = start + (stop - start) / W * W; k < stop; k++)
            for (int x = 0; x < TILE; x++) out[x] += (double)rows[x / WIDE][k] * columns[x % WIDE][k];
    }
}

/* l, r: [examples, s, q], [examples, s, p]; l2, r2: [examples, t, q], [examples, t, p]; the last dimension is dense, `strides` are those of
   the first two, in entries.  same: l2 is l and r2 is r; then diagonal[i] = Sum_s |L_s|^2 |R_s|^2, else 0. */
void NAME(gram)(const T *l, const T *r, const T *l2, const T *r2, const int64_t strides[8], int64_t examples, int64_t s, int64_t t, int64_t q,
                int64_t p, int same, int threads, double *out, double *diagonal) {
    int64_t panel = PANEL_BYTES / (int64_t)sizeof(T) / ((q + p) * WIDE) * WIDE;  /* rows of l2 and r2 that stay in the cache */
    if (panel < WIDE) panel = WIDE;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t example = 0; example < examples; example++) {
        const T *L = l + example * strides[0], *R = r + example * strides[2], *L2 = l2 + example * strides[4], *R2 = r2 + example * strides[6];
        double total = 0, alone = 0;
        for (int64_t first = 0; first < t; first += panel)
            for (int64_t i = same ? first / HIGH * HIGH : 0; i < s; i += HIGH)
                for (int64_t j = first; j < t && j < first + panel && !(same && j >= i + HIGH); j += WIDE) {
                    /* beyond the end the last row stands in, and its products are left out */
                    const T *rows[2][HIGH], *columns[2][WIDE];
                    double left[TILE], right[TILE];
                    for (int a = 0; a < HIGH; a++) {
                        int64_t row = i + a < s ? i + a : s - 1;
                        rows[0][a] = L + row * strides[1];
                        rows[1][a] = R + row * strides[3];
                    }
                    for (int b = 0; b < WIDE; b++) {
                        int64_t column = j + b < t ? j + b : t - 1;
                        columns[0][b] = L2 + column * strides[5];
                        columns[1][b] = R2 + column * strides[7];
                    }
                    NAME(dots)(rows[0], columns[0], q, left);
                    NAME(dots)(rows[1], columns[1], p, right);
                    for (int a = 0; a < HIGH && i + a < s; a++)
                        for (int b = 0; b < WIDE && j + b < t; b++) {
                            double product = left[a * WIDE + b] * right[a * WIDE + b];
                            if (!same || j + b < i + a) total += same ? 2 * product : product;
                            else if (j + b == i + a) alone += product;
                        }
                }
        out[example] = total + alone;
        diagonal[example] = alone;
    }
}

/* ---- dense: a matrix product an example, over the positions of all points side by side, DEPTH of them at a time.  ROWS x 2 registers of the
   result are held while the positions pass by; at the last of them their squares are added up, in double across registers of one lane. */

/* packed[k ROWS + i] = weight from[k stride + i], 0 beyond `used`. */
static inline void NAME(pack)(const T *from, int64_t stride, int64_t steps, T weight, int used, T *packed) {
    for (int64_t k = 0; k < steps; k++, from += stride, packed += ROWS)
        if (used == ROWS) {
            UNROLL for (int i = 0; i < ROWS; i++) packed[i] = weight * from[i];
        } else {
            for (int i = 0; i < ROWS; i++) packed[i] = i < used ? weight * from[i] : 0;
        }
}

/* tile [ROWS, 2 LANES], rows `stride` apart, = (or += if `more`) Sum_k left[k ROWS + i] right[k 2 LANES + j]; returns its sum of squares. */
static inline double NAME(multiply)(const T *left, const T *right, int64_t steps, int more, T *tile, int64_t stride) {
    enum { W = NAME(LANES) };
    NAME(vector) sums[ROWS][2];
    UNROLL for (int i = 0; i < ROWS; i++)
        UNROLL for (int j = 0; j < 2; j++) {
            sums[i][j] = (NAME(vector)){0};
            if (more) sums[i][j] = *(const NAME(unaligned) *)(tile + i * stride + j * W);
        }
    for (int64_t k = 0; k < steps; k++, left += ROWS, right += 2 * W) {
        NAME(vector) columns[2];
        UNROLL for (int j = 0; j < 2; j++) {
            columns[j] = *(const NAME(unaligned) *)(right + j * W);
            IN_A_REGISTER(columns[j]);
        }
        UNROLL for (int i = 0; i < ROWS; i++)
            UNROLL for (int j = 0; j < 2; j++) sums[i][j] += left[i] * columns[j];
    }
    NAME(vector) squares = {0};
    UNROLL for (int i = 0; i < ROWS; i++)
        UNROLL for (int j = 0; j < 2; j++) {
            *(NAME(unaligned) *)(tile + i * stride + j * W) = sums[i][j];
            squares += sums[i][j] * sums[i][j];
        }
    double total = 0;
    for (int lane = 0; lane < W; lane++) total += squares[lane];
    return total;
}

/* packed[k width + i] = entry column + i of window k, 0 beyond `used`.  A window is made of pieces of `run` entries, `jump` apart. */
static inline void NAME(pack_windows)(const T *from, const int64_t *starts, int64_t steps, int64_t run, int64_t jump, int64_t column,
                                      int used, T *packed) {
    enum { WIDTH = 2 * NAME(LANES) };
    int64_t piece = column / run, at = column - piece * run;
    from += piece * jump + at;
    if (used == WIDTH && at + WIDTH <= run) {
        for (int64_t k = 0; k < steps; k++, packed += WIDTH) memcpy(packed, from + starts[k], WIDTH * sizeof(T));
        return;
    }
    int64_t offset[WIDTH];
    for (int i = 0; i < used; i++) offset[i] = (at + i) / run * (jump - run) + i;
    for (int64_t k = 0; k < steps; k++, packed += WIDTH)
        for (int i = 0; i < WIDTH; i++) packed[i] = i < used ? from[starts[k] + offset[i]] : 0;
}

/* out[example] [q, p] = Sum_points w Sum_s l_s r_s^T, squares[example] = |out[example]|^2.  l, r: a pointer a point.  l [examples, s, q]
   with a dense last dimension, strides[2 point ...] of the first two.  r: a row of p entries is Sum_i [run entries at i jump], examples
   are `apart` and row s begins at starts[s].  All in entries. */
void NAME(dense)(const T *const *l, const T *const *r, const int64_t *strides, int64_t apart, const int64_t *starts, int64_t run, int64_t jump,
                 const double *weights, int64_t points, int64_t examples, int64_t s, int64_t q, int64_t p, int threads, T *out,
                 double *squares) {
    enum { COLUMNS = 2 * NAME(LANES) };
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t example = 0; example < examples; example++) {
        T left[DEPTH * PANEL], right[DEPTH * COLUMNS], edge[ROWS * COLUMNS], *result = out + example * q * p;
        double total = 0;
        for (int64_t first = 0; first < points * s; first += DEPTH) {
            int64_t depth = points * s - first < DEPTH ? points * s - first : DEPTH;
            int more = first > 0, last = first + depth == points * s;
            for (int64_t row = 0; row < q; row += PANEL) {
                int64_t rows = q - row < PANEL ? q - row : PANEL;
                for (int64_t column = 0; column < p; column += COLUMNS) {
                    int columns = p - column < COLUMNS ? p - column : COLUMNS;
                    for (int64_t k = 0; k < depth;) {  /* positions of one point */
                        int64_t point = (first + k) / s, at = (first + k) % s, steps = s - at < depth - k ? s - at : depth - k;
                        int64_t stride = strides[2 * point + 1];
                        const T *L = l[point] + example * strides[2 * point] + at * stride + row;
                        if (column == 0)
                            for (int64_t i = 0; i < rows; i += ROWS)
                                NAME(pack)(L + i, stride, steps, weights[point], rows - i < ROWS ? rows - i : ROWS, left + i * depth + k * ROWS);
                        NAME(pack_windows)(r[point] + example * apart, starts + at, steps, run, jump, column, columns, right + k * COLUMNS);
                        k += steps;
                    }
                    for (int64_t i = 0; i < rows; i += ROWS) {
                        int high = rows - i < ROWS ? rows - i : ROWS;
                        T *tile = result + (row + i) * p + column;
                        double sum;
                        if (high == ROWS && columns == COLUMNS) {
                            sum = NAME(multiply)(left + i * depth, right, depth, more, tile, p);
                        } else {
                            memset(edge, 0, sizeof edge);
                            for (int a = 0; more && a < high; a++) memcpy(edge + a * COLUMNS, tile + a * p, columns * sizeof(T));
                            sum = NAME(multiply)(left + i * depth, right, depth, more, edge, COLUMNS);
                            for (int a = 0; a < high; a++) memcpy(tile + a * p, edge + a * COLUMNS, columns * sizeof(T));
                        }
                        if (last) total += sum;
                    }
                }
            }
        }
        squares[example] = total;
    }
}

#endif
#endif
