/* Steps of a scheme for blocks of trajectories. T is float or double, LANES the trajectories of a block.
   Functions of the step are written for one lane, and compilers make vectors of the loops over lanes. */
#define EACH_LANE _Pragma("omp simd") for (int s = 0; s < LANES; s++)
#define VECTOR_BYTES 64
#define MOST_ROWS 4 /* of a matrix product whose sums are kept in registers */
typedef T State[LANES] __attribute__((aligned(VECTOR_BYTES)));
typedef double Wide[LANES] __attribute__((aligned(VECTOR_BYTES)));
#ifdef VECTOR_MATH
#define OF_VECTORS __attribute__((simd("notinbranch"), const))
#else
#define OF_VECTORS __attribute__((const))
#endif
