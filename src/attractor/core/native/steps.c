/* Take up to `count` steps of the trajectories from `first` on, and return how many were taken: with
   `stops`, only those before one of them, which is not `anywhere`, is outside. */
static long long advance(const T *u, const T *parameters, const T *t, const T *dt, T *out,
                         const unsigned char *anywhere, unsigned char *inside, unsigned char *stayed,
                         const T *const *memory, long long n, long long count, long long first,
                         int stops) {
  Block x[STATE], p[PARAMETERS + 1];
  unsigned char here[LANES];
  int lanes = n - first < LANES ? (int)(n - first) : LANES;
  for (int s = 0; s < LANES; s++) { /* the last trajectory stands in for those beyond it */
    long long from = first + (s < lanes ? s : lanes - 1);
    for (int i = 0; i < STATE; i++) x[i][s] = u[i * n + from];
    for (int i = 0; i < PARAMETERS; i++) p[i][s] = parameters[i * n + from];
    if (s < lanes) stayed[from] = inside[from] = 1;
  }
  long long taken = 0;
  for (;; taken++) {
    if (GUARDED) {
      int leaves = 0;
      region(x, p, here, memory);
      for (int s = 0; s < lanes; s++) {
        inside[first + s] = here[s];
        leaves |= !(here[s] | anywhere[first + s]);
      }
      if (stops && leaves) break;
    }
    if (taken == count) break;
    for (int s = 0; GUARDED && s < lanes; s++) stayed[first + s] &= inside[first + s];
    step(t[taken], dt[taken], x, p, memory);
  }
  for (int i = 0; i < STATE; i++)
    for (int s = 0; s < lanes; s++) out[i * n + first + s] = x[i][s];
  return taken;
}

/* Take up to `count` steps of n trajectories, fewer if one of them leaves, and return how many.

   u and out [STATE, n], parameters [PARAMETERS, n], t and dt [count]; anywhere, inside and stayed [n].
   `inside` is of the states in out. */
long long steps(const T *u, const T *parameters, const T *t, const T *dt, T *out,
                const unsigned char *anywhere, unsigned char *inside, unsigned char *stayed,
                const T *const *memory, long long n, long long count, int threads) {
  long long least = count;
#pragma omp parallel for num_threads(threads) if (threads > 1 && n > 16 * LANES) reduction(min : least)
  for (long long first = 0; first < n; first += LANES) {
    long long taken = advance(u, parameters, t, dt, out, anywhere, inside, stayed, memory, n, count,
                              first, 1);
    least = taken < least ? taken : least;
  }
  if (least < count) /* all trajectories take as many steps */
#pragma omp parallel for num_threads(threads) if (threads > 1 && n > 16 * LANES)
    for (long long first = 0; first < n; first += LANES)
      advance(u, parameters, t, dt, out, anywhere, inside, stayed, memory, n, least, first, 0);
  return least;
}
