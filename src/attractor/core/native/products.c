/* Blocks of numbers of type T, and products of matrices with them. This file is included once for each type,
   with other names. */
typedef T Vector
    __attribute__((vector_size(LANES * sizeof(T) < VECTOR_BYTES ? LANES * sizeof(T) : VECTOR_BYTES)));
typedef T Block[LANES] __attribute__((aligned(sizeof(Vector))));
#undef VECTORS
#define VECTORS (LANES * (int)sizeof(T) / (int)sizeof(Vector))

/* A few rows of a product. */
static inline __attribute__((always_inline)) void some_rows(const T *weights, long row, long column,
                                                            const int rows, int columns, const Block *z,
                                                            Block *out) {
  Vector sum[MOST_ROWS][VECTORS] = {{{0}}};
  for (int i = 0; i < columns; i++)
    for (int q = 0; q < rows; q++)
      for (int v = 0; v < VECTORS; v++)
        sum[q][v] += weights[q * row + i * column] * ((const Vector *)z[i])[v];
  for (int q = 0; q < rows; q++)
    for (int v = 0; v < VECTORS; v++) ((Vector *)out[q])[v] = sum[q][v];
}

/* out = weights z, where the weight of row r and column i is weights[r * row + i * column]. */
static inline void product(const T *weights, long row, long column, int rows, int columns,
                           const Block *z, Block *out) {
  int r = 0;
  for (; r + MOST_ROWS <= rows; r += MOST_ROWS)
    some_rows(weights + r * row, row, column, MOST_ROWS, columns, z, out + r);
  switch (rows - r) {
  case 3: some_rows(weights + r * row, row, column, 3, columns, z, out + r); break;
  case 2: some_rows(weights + r * row, row, column, 2, columns, z, out + r); break;
  case 1: some_rows(weights + r * row, row, column, 1, columns, z, out + r); break;
  }
}
