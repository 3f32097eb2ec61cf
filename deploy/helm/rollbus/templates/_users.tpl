{{- /* The users of all fleets with their Secrets, as JSON, for files/make_users.py. */ -}}
{{- define "rollbus.users" -}}
{{- $fleets := list }}
{{- range $fleet := .Values.fleets }}
{{- $prefix := printf "%s-%s" $.Release.Name $fleet.name }}
{{- $users := list }}
{{- range $rotation := untilStep (int $.Values.auth.keepFrom) (add1 (int $.Values.auth.rotation) | int) 1 }}
{{- $k := include "rollbus.suffix" $rotation }}
{{- range list "admin" "viewer" }}
{{- $users = append $users (dict "role" . "name" (printf "%s%s" . $k) "secret" (printf "%s-%s%s" $prefix . $k) "key" (printf "%s.creds" .)) }}
{{- end }}
{{- range ($fleet.trainers | default list) }}
{{- $users = append $users (dict "role" "trainer" "name" (printf "%s%s" . $k) "secret" (printf "%s-trainers%s" $prefix $k) "key" (printf "%s.creds" .)) }}
{{- end }}
{{- range ($fleet.publishers | default list) }}
{{- $users = append $users (dict "role" "publisher" "models" .models "name" (printf "%s%s" .name $k) "secret" (printf "%s-publishers%s" $prefix $k) "key" (printf "%s.creds" .name)) }}
{{- end }}
{{- $f := mergeOverwrite (deepCopy $.Values.frontend) (deepCopy ($fleet.frontend | default dict)) }}
{{- range $i := until (int $f.replicas) }}
{{- $users = append $users (dict "role" "frontend" "name" (printf "%s-http-%d%s" $prefix $i $k) "secret" (printf "%s-http-keys%s" $prefix $k) "key" (printf "%s-http-%d.creds" $prefix $i)) }}
{{- end }}
{{- range $entry := $fleet.workers }}
{{- $w := include "rollbus.worker" (dict "root" $ "fleet" $fleet "worker" $entry) | fromJson }}
{{- range $i := until (int $w.keys) }}
{{- $users = append $users (dict "role" "worker" "name" (printf "%s-%d%s" $w.set $i $k) "secret" (printf "%s-keys%s" $w.set $k) "key" (printf "%s-%d.creds" $w.set $i)) }}
{{- end }}
{{- end }}
{{- end }}
{{- $fleets = append $fleets (dict "name" $fleet.name "tokens" (printf "%s-http-tokens" $prefix) "users" $users) }}
{{- end }}
{{- toJson (dict "root" (printf "%s-root" .Release.Name) "server" (printf "%s-users" .Release.Name) "keepFrom" (int .Values.auth.keepFrom) "fleets" $fleets) }}
{{- end }}
