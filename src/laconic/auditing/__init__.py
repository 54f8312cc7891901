"""A first step compared with the exact computation: `laconic.audit`.

No relation to laconic.collectives.audit, which records the codecs that collectives chose.
"""

from laconic.auditing.batch import first_rows
from laconic.auditing.first_call import audit_first_call, audit_now, say_left_out
from laconic.auditing.first_step import AuditReport, audit, audit_loss

__all__ = ["AuditReport", "audit", "audit_first_call", "audit_loss", "audit_now", "first_rows", "say_left_out"]
