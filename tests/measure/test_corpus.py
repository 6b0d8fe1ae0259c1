from tilewright.measure.corpus import corpus


def test_the_corpus_is_text_and_long_enough():
    text = corpus(1 << 20)
    assert len(text) == 1 << 20 and text.count(b"def ") > 100
