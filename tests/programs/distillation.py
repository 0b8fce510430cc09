"""Knowledge distillation: a student learns labels and the softened outputs of
a frozen teacher.
"""

import keras
import numpy as np
from keras import layers, ops


class Distiller(keras.Model):
    """Mix the student's loss with its distance from the teacher."""

    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(
        self,
        optimizer,
        metrics,
        student_loss_fn,
        distillation_loss_fn,
        alpha=0.1,
        temperature=3,
    ):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(
        self,
        x=None,
        y=None,
        y_pred=None,
        sample_weight=None,
        training=True,
        allow_empty=False,
    ):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        return (
            self.alpha * student_loss + (1 - self.alpha) * distillation_loss
        )

    def call(self, x):
        return self.student(x)


keras.utils.set_random_seed(11)
rng = np.random.default_rng(11)
x = rng.normal(size=(75, 10)).astype("float32")
y = x[:, :5].argmax(axis=1)

teacher = keras.Sequential(
    [keras.Input((10,)), layers.Dense(32, activation="relu"), layers.Dense(5)]
)
teacher.compile(
    "adam",
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
taught = teacher.fit(x, y, batch_size=15, epochs=3, verbose=0)
student = keras.Sequential(
    [keras.Input((10,)), layers.Dense(6, activation="relu"), layers.Dense(5)]
)
teacher.trainable = False

distiller = Distiller(student, teacher)
distiller.compile(
    optimizer=keras.optimizers.Adam(0.01),
    metrics=[keras.metrics.SparseCategoricalAccuracy()],
    student_loss_fn=keras.losses.SparseCategoricalCrossentropy(
        from_logits=True
    ),
    distillation_loss_fn=keras.losses.KLDivergence(),
)
history = distiller.fit(x, y, batch_size=20, epochs=3, verbose=0)
score = distiller.evaluate(x, y, batch_size=32, verbose=0)

result = {
    "taught": taught.history,
    "history": history.history,
    "student": student.get_weights(),
    "teacher": teacher.get_weights(),
    "score": score,
}
