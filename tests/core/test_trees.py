from fractions import Fraction

from attractor.core.trees import defect, density, size, trees


def test_number_of_rooted_trees():
    # OEIS A000081
    assert [len(trees(n)) for n in range(1, 9)] == [1, 1, 2, 4, 9, 20, 48, 115]


def test_trees_are_distinct_and_of_their_size():
    for n in range(1, 7):
        assert len(set(trees(n))) == len(trees(n))
        assert all(size(tree) == n for tree in trees(n))


def test_density_of_known_trees():
    tall, bush = ((((),),),), ((), (), ())
    assert density(tall) == 24
    assert density(bush) == 4


def test_defect_of_euler():
    assert defect(1, [Fraction(1)], [[]]) == 0
    assert defect(2, [Fraction(1)], [[]]) == Fraction(1, 2)
