/* Linear systems of blocks of trajectories, by Gaussian elimination with row exchanges. */
typedef unsigned char Flags[LANES];

/* Replace a matrix [STATE, STATE] by its factors. exchanges[r * STATE + c] says for each trajectory whether
   the rows r and c were exchanged while column c was eliminated. */
static inline void factorise(Block *a, Flags *exchanges) {
  for (int c = 0; c < STATE; c++) {
    for (int r = c + 1; r < STATE; r++) {
      int any = 0;
      unsigned char *flags = exchanges[r * STATE + c];
      for (int s = 0; s < LANES; s++) {
        T x = a[r * STATE + c][s], y = a[c * STATE + c][s];
        flags[s] = (x < 0 ? -x : x) > (y < 0 ? -y : y);
        any |= flags[s];
      }
      if (!any) continue;
      for (int j = 0; j < STATE; j++) EACH_LANE {
          T x = a[r * STATE + j][s], y = a[c * STATE + j][s];
          a[r * STATE + j][s] = flags[s] ? y : x;
          a[c * STATE + j][s] = flags[s] ? x : y;
        }
    }
    Block inverse;
    EACH_LANE inverse[s] = 1 / a[c * STATE + c][s];
    for (int r = c + 1; r < STATE; r++) {
      EACH_LANE a[r * STATE + c][s] *= inverse[s];
      for (int j = c + 1; j < STATE; j++)
        EACH_LANE a[r * STATE + j][s] -= a[r * STATE + c][s] * a[c * STATE + j][s];
    }
    EACH_LANE a[c * STATE + c][s] = inverse[s];
  }
}

/* Replace x [STATE] by the solution of the system whose right side it is. */
static inline void solve(const Block *a, const Flags *exchanges, Block *x) {
  for (int c = 0; c < STATE; c++)
    for (int r = c + 1; r < STATE; r++) EACH_LANE {
        T first = x[c][s], second = x[r][s];
        x[c][s] = exchanges[r * STATE + c][s] ? second : first;
        x[r][s] = exchanges[r * STATE + c][s] ? first : second;
      }
  for (int r = 1; r < STATE; r++)
    for (int c = 0; c < r; c++) EACH_LANE x[r][s] -= a[r * STATE + c][s] * x[c][s];
  for (int r = STATE - 1; r >= 0; r--) {
    for (int c = r + 1; c < STATE; c++) EACH_LANE x[r][s] -= a[r * STATE + c][s] * x[c][s];
    EACH_LANE x[r][s] *= a[r * STATE + r][s];
  }
}
