/* Per-example gradients Sum_s L_s R_s^T, for engines/parts.py: their squared norms from the factors alone (gram), or themselves and their
   squared norms in one go (dense); and the weighted sum of gradients (sum).  This file is included once for each type. */

#ifdef _OPENMP
#ifndef T

#include <float.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
enum { BYTES = 64, HIGH = 4, WIDE = 4, ROWS = 12 };
#elif defined(__AVX__)
enum { BYTES = 32, HIGH = 4, WIDE = 3, ROWS = 6 };
#else
enum { BYTES = 16, HIGH = 4, WIDE = 3, ROWS = 6 };
#endif
enum { TILE = HIGH * WIDE, BLOCKS = 16, TILES = 2, CHUNK_BYTES = 3072 };  /* of gram: columns of a chunk stay in the nearest cache */
enum { DEPTH = 256, PANEL = 192 };                                        /* of dense; ROWS divides PANEL */
enum { SPAN = 1024, TOGETHER = 8 };                                       /* of sum: entries that stay near, rows that are read at a time */

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

enum { NAME(LANES) = BYTES / sizeof(T), NAME(CHUNK) = CHUNK_BYTES / sizeof(T), NAME(PART) = 16 / sizeof(T) };
typedef T NAME(part) __attribute__((vector_size(16), may_alias));
typedef double NAME(doubles) __attribute__((vector_size(16 / sizeof(T) * sizeof(double))));
typedef T NAME(vector) __attribute__((vector_size(BYTES)));
typedef T NAME(unaligned) __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
typedef LANE NAME(mask) __attribute__((vector_size(BYTES)));

/* ---- gram: BLOCKS blocks of HIGH rows meet TILES tiles of WIDE columns, the columns rows of the second factors.  Of a chunk of CHUNK entries
   the columns stay in the nearest cache while all blocks pass by.  Products are summed in the factors' own type, in as many partial sums as a
   register has lanes, and over 16 bytes; what is left, and chunks, are added in double.  Of a factor with itself only the products on and below
   the diagonal are formed. */

/* sums[i WIDE + j] = partial sums of rows[i] . column j over `steps` registers; a column is a row of `columns`, CHUNK entries apart.  In a
   function of its own, so that all of them stay in registers. */
static __attribute__((noinline)) void NAME(accumulate)(const T *const rows[HIGH], int64_t at, const T *columns, int64_t steps,
                                                       NAME(vector) *sums) {
    NAME(vector) held[TILE] = {{0}};
    const T *r[HIGH];
    UNROLL for (int i = 0; i < HIGH; i++) r[i] = rows[i] + at;
    for (int64_t k = 0; k < steps * NAME(LANES); k += NAME(LANES)) {
        NAME(vector) row, column[WIDE];
        UNROLL for (int j = 0; j < WIDE; j++) {
            column[j] = *(const NAME(unaligned) *)(columns + j * NAME(CHUNK) + k);
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

/* out[i WIDE + j] += rows[i] . column j, of `count` entries, those of the rows from `at`. */
static inline void NAME(dots)(const T *const rows[HIGH], int64_t at, const T *columns, int64_t count, NAME(doubles) *out) {
    enum { W = NAME(LANES), PART = NAME(PART) };
    NAME(vector) sums[TILE];
    NAME(accumulate)(rows, at, columns, count / W, sums);
    /* Two registers become one: of each 16 bytes, neighbours are added.  In the end 16 bytes hold a part of each of PART sums. */
    UNROLL for (int left = TILE / 2; left >= TILE / PART; left /= 2) {
        NAME(mask) even, odd;
        UNROLL for (int lane = 0; lane < W; lane++) {
            int sum = lane % PART, from = sum < PART / 2 ? 0 : W;
            even[lane] = from + lane / PART * PART + 2 * sum % PART;
            odd[lane] = even[lane] + 1;
        }
        UNROLL for (int x = 0; x < left; x++) {
            NAME(vector) a = sums[2 * x], b = sums[2 * x + 1];
            sums[x] = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
        }
    }
    UNROLL for (int x = 0; x < TILE / PART; x++)
        UNROLL for (int part = 0; part < W; part += PART)
            out[x] += __builtin_convertvector(*(const NAME(part) *)((const T *)&sums[x] + part), NAME(doubles));
    for (int64_t k = count / W * W; k < count; k++)
        for (int x = 0; x < TILE; x++) out[x / PART][x % PART] += (double)rows[x / WIDE][at + k] * columns[x % WIDE * NAME(CHUNK) + k];
}

/* l, r: [examples, s, q], [examples, s, p]; l2, r2: [examples, t, q], [examples, t, p]; the last dimension is dense, `strides` are those of
   the first two, in entries.  same: l2 is l and r2 is r; then diagonal[i] = Sum_s (|L_s|^2 + q lost) (|R_s|^2 + p lost), else 0: see
   UNDERFLOWS in parts.py. */
void NAME(gram)(const T *l, const T *r, const T *l2, const T *r2, const int64_t strides[8], int64_t examples, int64_t s, int64_t t, int64_t q,
                int64_t p, int same, int threads, double *out, double *diagonal) {
    enum { PART = NAME(PART), CHUNK = NAME(CHUNK) };
    const T *first[4] = {l, r, l2, r2};
    const int64_t length[2] = {q, p};
    const double lost = s * (sizeof(T) == sizeof(float) ? 0x1p24 * FLT_MIN : 0x1p51 * DBL_MIN);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t example = 0; example < examples; example++) {
        NAME(doubles) inside = {0};
        double edge = 0, alone = 0, most = 0;
        for (int64_t left = 0; left < t; left += TILES * WIDE)
            for (int64_t top = same ? left / HIGH * HIGH : 0; top < s; top += BLOCKS * HIGH) {
                NAME(doubles) products[2][BLOCKS][TILES][TILE / PART] = {{{{{0}}}}};
                int tiles[BLOCKS];  /* of each block of rows; 0 beyond the end */
                for (int block = 0; block < BLOCKS; block++) {
                    int64_t row = top + block * HIGH, end = same && row + HIGH < t ? row + HIGH : t;
                    tiles[block] = row >= s ? 0 : end - left >= TILES * WIDE ? TILES : (int)((end - left + WIDE - 1) / WIDE);
                }
                for (int factor = 0; factor < 2; factor++) {
                    const T *rows[BLOCKS * HIGH], *columns[TILES * WIDE];
                    /* beyond the end the last row stands in, and its products are left out */
                    for (int i = 0; i < BLOCKS * HIGH; i++)
                        rows[i] = first[factor] + example * strides[2 * factor] + (top + i < s ? top + i : s - 1) * strides[2 * factor + 1];
                    for (int j = 0; j < TILES * WIDE; j++)
                        columns[j] = first[2 + factor] + example * strides[4 + 2 * factor] +
                                     (left + j < t ? left + j : t - 1) * strides[5 + 2 * factor];
                    for (int64_t at = 0, count; at < length[factor]; at += count) {
                        count = length[factor] - at < CHUNK ? length[factor] - at : CHUNK;
                        T near[TILES * WIDE][CHUNK];  /* columns that are powers of two apart would push one another out of the cache */
                        for (int j = 0; j < TILES * WIDE; j++) memcpy(near[j], columns[j] + at, count * sizeof(T));
                        for (int block = 0; block < BLOCKS; block++)
                            for (int tile = 0; tile < tiles[block]; tile++)
                                NAME(dots)(rows + block * HIGH, at, near[tile * WIDE], count, products[factor][block][tile]);
                    }
                }
                for (int block = 0; block < BLOCKS; block++)
                    for (int tile = 0; tile < tiles[block]; tile++) {
                        const NAME(doubles) *lefts = products[0][block][tile], *rights = products[1][block][tile];
                        int64_t i = top + block * HIGH, j = left + tile * WIDE;
                        if (i + HIGH <= s && j + WIDE <= t && !(same && j + WIDE > i)) {
                            UNROLL for (int x = 0; x < TILE / PART; x++) inside += lefts[x] * rights[x];
                            continue;
                        }
                        for (int x = 0; x < TILE; x++) {
                            int64_t row = i + x / WIDE, column = j + x % WIDE;
                            double dots[2] = {lefts[x / PART][x % PART], rights[x / PART][x % PART]}, product = dots[0] * dots[1];
                            if (row >= s || column >= t || (same && column > row)) continue;
                            if (same && column == row) {
                                alone += product;
                                most += (dots[0] + q * lost) * (dots[1] + p * lost);
                            } else {
                                edge += product;
                            }
                        }
                    }
            }
        for (int x = 0; x < PART; x++) edge += inside[x];
        out[example] = (same ? 2 * edge : edge) + alone;
        diagonal[example] = most;
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
        UNROLL for (int j = 0; j < 2; j++) sums[i][j] = (NAME(vector)){0};
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
            /* added here, not summed on from here: in one long sum of like terms all roundings may point the same way */
            if (more) sums[i][j] += *(const NAME(unaligned) *)(tile + i * stride + j * W);
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

/* The factors of all points: see NAME(dense). */
typedef struct {
    const T *const *l, *const *r;
    const int64_t *strides, *starts;
    const double *weights;
    int64_t apart, run, jump, points, s, p;
} NAME(factors);

/* Rows row ... row + rows - 1 of result [q, p], = (or += if `add`) Sum_points w Sum_s l_s r_s^T of one example; returns their squared norm. */
static double NAME(panel)(const NAME(factors) *f, int64_t example, int64_t row, int64_t rows, int add, T *result) {
    enum { COLUMNS = 2 * NAME(LANES) };
    T left[DEPTH * PANEL], right[DEPTH * COLUMNS], edge[ROWS * COLUMNS];
    const int64_t s = f->s, p = f->p, positions = f->points * s;
    double total = 0;
    for (int64_t first = 0; first < positions; first += DEPTH) {
        int64_t depth = positions - first < DEPTH ? positions - first : DEPTH;
        int more = add || first > 0, last = first + depth == positions;
        for (int64_t column = 0; column < p; column += COLUMNS) {
            int columns = p - column < COLUMNS ? p - column : COLUMNS;
            for (int64_t k = 0; k < depth;) {  /* positions of one point */
                int64_t point = (first + k) / s, at = (first + k) % s, steps = s - at < depth - k ? s - at : depth - k;
                int64_t stride = f->strides[2 * point + 1];
                const T *l = f->l[point] + example * f->strides[2 * point] + at * stride + row;
                const T *r = f->r[point] + example * f->apart;
                if (column == 0)
                    for (int64_t i = 0; i < rows; i += ROWS)
                        NAME(pack)(l + i, stride, steps, f->weights[point], rows - i < ROWS ? rows - i : ROWS, left + i * depth + k * ROWS);
                NAME(pack_windows)(r, f->starts + at, steps, f->run, f->jump, column, columns, right + k * COLUMNS);
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
    return total;
}

/* out[example] [q, p] = Sum_points w Sum_s l_s r_s^T, squares[example] = |out[example]|^2.  l, r: a pointer a point.  l [examples, s, q]
   with a dense last dimension, strides[2 point ...] of the first two.  r: a row of p entries is Sum_i [run entries at i jump], examples
   are `apart` and row s begins at starts[s].  All in entries.  Threads share the examples. */
void NAME(dense)(const T *const *l, const T *const *r, const int64_t *strides, int64_t apart, const int64_t *starts, int64_t run, int64_t jump,
                 const double *weights, int64_t points, int64_t examples, int64_t s, int64_t q, int64_t p, int threads, T *out,
                 double *squares) {
    const NAME(factors) f = {l, r, strides, starts, weights, apart, run, jump, points, s, p};
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t example = 0; example < examples; example++) {
        double total = 0;
        for (int64_t row = 0; row < q; row += PANEL)
            total += NAME(panel)(&f, example, row, q - row < PANEL ? q - row : PANEL, 0, out + example * q * p);
        squares[example] = total;
    }
}

/* out [q, p] = (or += if `more`) Sum_points Sum_s l_s r_s^T.  l [s, q] and r [s, p] with dense last dimensions; strides: of each point's l
   twice, so that they are those of `dense`; starts: of the rows of r.  Threads share the rows of `out`. */
void NAME(product)(const T *const *l, const T *const *r, const int64_t *strides, const int64_t *starts, const double *weights, int64_t points,
                   int64_t s, int64_t q, int64_t p, int more, int threads, T *out) {
    const NAME(factors) f = {l, r, strides, starts, weights, 0, p, 0, points, s, p};
    int64_t share = ((q + threads - 1) / threads + ROWS - 1) / ROWS * ROWS, high = share < PANEL ? share : PANEL;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t row = 0; row < q; row += high) NAME(panel)(&f, 0, row, q - row < high ? q - row : high, more, out);
}

/* ---- sum: out[j] = (or += if `more`) Sum_i weights[i] rows[i n + j], j < n.  TOGETHER streams of memory at a time, in their order: the
   entries do not depend on the number of threads. */
void NAME(sum)(const T *rows, const T *weights, int64_t count, int64_t n, int more, int threads, T *out) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t from = 0; from < n; from += SPAN) {
        int64_t i = 0, span = n - from < SPAN ? n - from : SPAN;
        T total[SPAN] __attribute__((aligned(BYTES))) = {0};
        if (more) memcpy(total, out + from, span * sizeof(T));
        for (; i + TOGETHER <= count; i += TOGETHER) {
            const T *row = rows + i * n + from;
            for (int64_t j = 0; j < span; j++) {
                T sum = total[j];
                UNROLL for (int k = 0; k < TOGETHER; k++) sum += weights[i + k] * row[k * n + j];
                total[j] = sum;
            }
        }
        for (; i < count; i++)
            for (int64_t j = 0; j < span; j++) total[j] += weights[i] * rows[i * n + from + j];
        memcpy(out + from, total, span * sizeof(T));
    }
}

#endif
#endif
